"""Judging: gives validators submissions to judge, and takes their verdicts and projections.

It compares the projections of validators that saw the same activations, and books the verdict. `ledger/verdict_decisions`
decides what follows from it.
"""

import logging
from collections.abc import Sequence

import msgspec

from shoal.algos.activation_projection import VALUES, agree
from shoal.errors import NothingYet, StateError
from shoal.ledger.batches import SlotVoid
from shoal.ledger.commands import SubmitVerdict
from shoal.ledger.errors import Refused
from shoal.ledger.lease_granting import without_signal
from shoal.ledger.members import NodeQuarantined, ValidatorFault
from shoal.ledger.pay import Slash
from shoal.ledger.run_events import NO_SIGNAL, RulesChanged
from shoal.ledger.slot_draws import recheck_draw
from shoal.ledger.state import State
from shoal.ledger.state_records import SubmissionRecord
from shoal.ledger.validator_turns import silent, turn_s
from shoal.ledger.verdict_decisions import is_open, to_judge
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol import messages as t
from shoal.protocol.encoding import WireError, from_json, from_msgpack, to_json
from shoal.roles.coordinator.coordinator import Coordinator

MAX_REPORTED = 1000
"""Causes of void slots, of which each is logged once; of more, some are logged again."""

log = logging.getLogger("coordinator")


def admit_validator(coordinator: Coordinator, key: str) -> None:
    """Raises `Refused` unless the key is that of a validator of this run, suspended or not."""
    if key not in coordinator.state.validators:
        raise Refused("not_admitted", f"{key[:12]} is not a validator's key: the host must `shoal admin admit` it")


def next_check(coordinator: Coordinator, key: str) -> t.Check | None:
    """The oldest submission that it is this validator's turn to judge; None if there is none. Raises `Refused`."""
    node = coordinator.state.members.get(key)
    if node is None or node.role != "validator":
        raise Refused("not_joined", f"{key[:12]} has not joined as a validator: POST /v1/nodes first")
    if key not in coordinator.state.judges():  # guard: suspended-gets-no-work
        raise Refused("kicked", f"validator {node.name} ({key[:12]}) gets no more submissions: {node.last_reason}")
    now = max(coordinator.clock(), coordinator.state.time)  # as the log will say  # guard: judges-by-the-log
    names = to_judge(coordinator.state, key, now)
    if not names:
        return None
    submission = coordinator.state.submissions[names[0]]
    lease = coordinator.wire_lease(coordinator.state.leases[submission.lease])
    return t.Check(
        names[0], lease, submission.audited, now + turn_s(coordinator.state), submission.draws, submission.rate,
        submission.mean_influence, submission.mean_pay,
        (key, *submission.verdicts) if len(coordinator.state.panel()) > 1 else (), submission.record,
    )  # fmt: skip


async def take_verdict(coordinator: Coordinator, key: str, verdict: t.Verdict) -> None:
    """Book a verdict. Raises `Refused`."""
    submission = coordinator.state.submissions.get(verdict.submission)
    if submission is None:
        raise Refused("unknown", f"no submission {verdict.submission[:12]}")
    _demand_recorded_faults(coordinator, submission, verdict)
    projection, differs_from = _compare(coordinator, key, submission, verdict)
    bare = msgspec.structs.replace(verdict, projections={})
    lease = coordinator.state.lease_of(submission)
    again = recheck_draw(lease, coordinator.audit_links[lease.version + 1])
    judged = SubmitVerdict(key, bare, coordinator.clock(), projection, again, differs_from, coordinator.labels(lease))
    before = silent(coordinator.state, judged.now)
    try:
        entries = await coordinator.log_writer.submit(judged)
    except (Refused, StateError):
        coordinator.kept.forget_unbooked(projection, submission.projections.values())  # guard: unbooked-projections-go
        raise
    for entry in entries:
        match entry.body:
            case NodeQuarantined(node=node, cause=cause):
                log.info("quarantined node=%s cause=%r", node[:12], cause)
            case RulesChanged(phase="paused", cause=cause):
                log.warning(
                    "paused: %s",
                    without_signal(coordinator.state, coordinator.state.main) if cause == NO_SIGNAL else cause,
                )
            case SlotVoid(cause=cause) if _is_new(cause, coordinator.reported_void):  # once for each task
                log.warning("void slot: %s", cause)
            case Slash(node=node, tokens=tokens):
                log.warning("slashed node=%s tokens=%d submission=%s", node[:12], tokens, verdict.submission[:12])
            case ValidatorFault(validator=validator, cause=cause):
                log.warning("validator=%s submission=%s fault=%r", validator[:12], verdict.submission[:12], cause)
            case VerdictGiven(validator=validator, differs_from=others) if others:
                log.warning("validator=%s submission=%s finds other activations than validators=%s", validator[:12],
                            verdict.submission[:12], ",".join(other[:12] for other in others))  # fmt: skip
            case _:
                pass
    for skipped in sorted(silent(coordinator.state, judged.now) - before):
        log.warning("validator=%s is not waited for: %s", skipped[:12], _why_skipped(coordinator.state, skipped))


def _demand_recorded_faults(coordinator: Coordinator, submission: SubmissionRecord, verdict: t.Verdict) -> None:
    """Where the host plays, a validator may name no fault that the host's stage did not record, because the ledger takes it
    for the host's own finding. Raises `Refused`."""
    named = {group.slot: group.faults for group in verdict.groups if group.faults is not msgspec.UNSET}
    if not named or not submission.record or not is_open(coordinator.state, submission):
        return
    record = from_msgpack(coordinator.blobs.get(submission.record), t.Record)
    played = {group.slot: group.rollouts for group in record.groups}
    for slot, faults in named.items():
        rollouts = played.get(slot, ())
        failed = {index for index, one in enumerate(rollouts) if one.fault}
        outside = {index for index, one in enumerate(rollouts) if one.outside is not msgspec.UNSET}
        # guard: faults-as-recorded
        if not (failed.issuperset(faults.rollouts) and outside.issuperset(faults.outside)):
            raise Refused("malformed", f"slot {slot}: the verdict names faults that the host's stage did not record")


def _why_skipped(state: State, key: str) -> str:
    """Why a validator that is skipped is."""
    if key in state.judges():
        return f"missed_turns={state.members[key].turns.missed}"
    member = state.members.get(key)
    if member is None or member.left:
        return "it left" if member else "it has not joined"
    return f"standing={member.standing} reason={member.last_reason!r}"


def _is_new(cause: str, reported: dict[str, None]) -> bool:
    """Whether a cause was not logged yet. It then is."""
    if cause in reported:
        return False
    if len(reported) >= MAX_REPORTED:
        del reported[next(iter(reported))]
    reported[cause] = None
    return True


def _compare(
    coordinator: Coordinator, key: str, submission: SubmissionRecord, verdict: t.Verdict
) -> tuple[str, tuple[str, ...]]:
    """Keep the projections of a verdict; returns their blob, and the validators whose earlier projections differ.

    Raises `Refused` if a projection is missing for the validator itself or for one that has judged before it.
    """
    state, slots, judges = coordinator.state, _audited(verdict.groups), coordinator.state.panel()
    compared = key in judges and len(judges) > 1  # guard: projections-of-judges
    # guard: projections-of-first-verdicts
    if not compared or key in submission.verdicts or not is_open(state, submission) or not slots:
        return "", ()
    asked = (key, *submission.verdicts)
    if any(len(verdict.projections.get(other, ())) != VALUES for other in asked):  # guard: compared-with-all
        raise Refused("not_your_turn", f"submission {submission.digest[:12]}: the verdict lacks a projection for each "
                      "validator that has judged by now: ask GET /v1/checks again")  # fmt: skip
    shown = {other: verdict.projections[other] for other in asked}  # guard: projections-asked-for
    blob = coordinator.blobs.put(to_json(shown))
    coordinator.kept.expect(blob)
    coordinator.kept.projections[blob] = submission.digest
    # guard: accuse-of-the-same-slots
    alike = [other for other, groups in submission.verdicts.items() if _audited(groups) == slots]
    # guard: accuse-who-differs
    return blob, tuple(other for other in alike if not _agrees(coordinator, submission, other, shown))


def _agrees(
    coordinator: Coordinator, submission: SubmissionRecord, other: str, found: dict[str, tuple[float, ...]]
) -> bool:
    """Whether another validator's own projection is what a later validator found for that key."""
    try:
        data = coordinator.blobs.get(submission.projections.get(other, ""))
        claimed = from_json(data, dict[str, tuple[float, ...]])
    except (NothingYet, WireError):
        claimed = {}
    return agree(claimed.get(other, ()), found.get(other, ()))


def _audited(groups: Sequence[t.GroupVerdict]) -> set[int]:
    """Slots that were audited, so that the verdict shows projections of their activations."""
    return {group.slot for group in groups if group.audited}

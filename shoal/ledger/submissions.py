"""Submissions of rollouts, and the draw of the groups that validators audit."""

from msgspec import UNSET, UnsetType

from shoal.ledger.commands import Submit
from shoal.ledger.errors import Refused
from shoal.ledger.event import Body, Entry
from shoal.ledger.members import member_as
from shoal.ledger.replay_context import LogPosition, Table, Trigger
from shoal.ledger.slot_draws import audit_draws, turn_draws, turns
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, NodeRecord, SubmissionRecord
from shoal.ledger.validator_turns import by_speed
from shoal.protocol.audit_and_pay import influence
from shoal.protocol.constants import BODY_WINDOW_BYTES, BODY_WINDOW_S, BOOKED_WITHIN_S
from shoal.protocol.continuations import is_continued, parent_slot
from shoal.protocol.messages import Message

# --- Submissions ---


class SubmissionReceived(Message, frozen=True):
    lease: str
    worker: str
    digest: str
    """SHA-256 of the body: the submission's name."""
    size_bytes: int
    groups: tuple[str, ...]
    """Digest of each group, in the order of the lease's slots."""
    created: int = 0
    """When the worker signed it, seconds since the epoch by its own clock."""
    record: str | UnsetType = UNSET
    """Digest of the host's `Record` of the lease; only where the host plays the environments."""


class AuditDrawn(Message, frozen=True):
    """How closely a submission is looked at, fixed before anyone has judged it."""

    submission: str
    slots: tuple[int, ...]
    """Drawn for audit. Influence and pay, which the groups show, may add more, see
    `protocol.audit_and_pay.must_audit`."""
    rate: float = 1.0
    draws: tuple[float, ...] = ()
    """One for each group, in [0, 1)."""
    mean_influence: float = 0.0
    """Of the groups accepted until now."""
    order: tuple[str, ...] = ()
    """Validators in the order of their turns."""
    mean_pay: float = 0.0
    """Of the worker's newest groups that have not vested, tokens; those that a refusal takes."""


def apply_submission_received(body: SubmissionReceived, state: State, entry: Entry) -> None:
    lease = state.leases[body.lease]
    stream = state.stream_of(lease)
    late = lease.status != "open"
    if not late:
        state.close(lease)
    lease.status, lease.submission = "submitted", body.digest
    member = state.members[lease.worker]
    member.dropped = 0  # guard: submitting-ends-the-wait
    member.unfilled, lease.unfilled = member.unfilled - lease.unfilled, 0
    _measure_pace(member, lease, entry.time)
    for number in lease.blocks:
        block = stream.versions[lease.version].blocks[number]
        if block.status == "done":  # guard: copy-takes-no-block
            continue
        block.status = "submitted"
        if late:
            block.claims = [*block.claims, lease.id]
    stream.take(lease.version, lease.blocks)
    state.submissions[body.digest] = SubmissionRecord(
        body.lease,
        body.digest,
        entry.seq,
        entry.hash,
        entry.time,
        body.groups,
        judged_at=entry.time,
        record=body.record,
    )
    state.pending.append(body.digest)


def _measure_pace(member: NodeRecord, lease: LeaseRecord, now: float) -> None:
    """A worker plays one lease after another, so the time of one begins when the one before was sent. How long
    continuations take depends on how many there are, so they say nothing of a worker's usual speed."""
    took_s = (now - max(lease.issued, member.sent_at)) / len(lease.blocks)
    if not is_continued(lease.blocks[0]):  # guard: pace-of-ordinary-blocks
        member.measure_pace(took_s)
    member.sent_at = now


def apply_audit_drawn(body: AuditDrawn, state: State, entry: Entry) -> None:
    submission = state.submissions[body.submission]
    submission.audited, submission.rate, submission.draws = body.slots, body.rate, body.draws
    submission.mean_influence, submission.order = body.mean_influence, body.order
    submission.mean_pay = body.mean_pay


EVENTS = {
    "submission_received": (SubmissionReceived, apply_submission_received),
    "audit_drawn": (AuditDrawn, apply_audit_drawn),
}


# --- When a submission is taken, and how many of its groups are audited ---


def decide_submit(command: Submit, state: State) -> list[Body]:
    lease = lease_to_fill(state, command.key, command.lease, command.digest)
    if lease.submission:
        return []
    slots = state.slots_of(lease)
    if len(command.groups) != len(slots):  # guard: groups-of-the-lease
        raise Refused("malformed", f"lease {lease.id} has {len(slots)} slots, the submission {len(command.groups)}")
    refuse_other_time(state, command.created, command.now, command.size_bytes)  # guard: time-of-submission
    received = SubmissionReceived(
        command.lease, command.key, command.digest, command.size_bytes, command.groups,
        command.created, command.record,
    )  # fmt: skip
    mean_pay = mean_newest_pay(state, state.members[command.key])
    rate = state.law.audit_rate(state.members[command.key].valid_blocks, state.rules.audit_rate)
    if not mean_pay:  # guard: no-stake-no-trust
        rate = 1.0
    mean_influence = state.influence / state.accepted_groups if state.accepted_groups else 0.0
    if mean_influence and is_continued(lease.blocks[0]):  # guard: continued-as-parents
        rate = min(1.0, rate * max(1.0, _influence_of_parents(state, lease) / mean_influence))
    audited = tuple(slot for slot, draw in zip(slots, command.draws, strict=True) if draw < rate)
    judges = state.judges()
    order = by_speed(state, tuple(key for key in command.order if key in judges), command.turn_draws)
    return [received, AuditDrawn(command.digest, audited, rate, command.draws, mean_influence, order, mean_pay)]


def _influence_of_parents(state: State, lease: LeaseRecord) -> float:
    """The largest of the groups that a lease continues: continuations move the credit of their parents' tokens."""
    slots, size = state.stream_of(lease).versions[lease.version].slots, state.rules.block_groups
    parents = [slots[parent_slot(slot, size)] for slot in state.slots_of(lease)]
    by = state.rules.algorithm
    return max(influence(one.rewards, one.tokens, by, faults=one.faults or ()) for one in parents)


def mean_newest_pay(state: State, member: NodeRecord) -> float:
    """Mean pay of a worker's newest groups, those that a refusal takes, tokens. Groups that are missing count as 0, so less
    at stake raises the rate, too."""
    groups = state.law.refused_blocks * state.rules.block_groups
    return sum(member.stake[-groups:]) / groups  # guard: pay-at-stake


def lease_to_fill(state: State, key: str, lease_id: str, digest: str) -> LeaseRecord:
    """The lease that a worker may fill with a submission, or has filled with this very one. Raises `Refused`.

    The coordinator also asks before it reads a submission's body.
    """
    member_as(state, key, "worker")
    lease = state.leases.get(lease_id)
    if lease is None or lease.worker != key:  # guard: own-lease
        raise Refused("not_yours", f"lease {lease_id} is not one of yours")
    if lease.submission and lease.submission != digest:  # guard: lease-filled-once
        raise Refused("conflict", f"lease {lease.id} was filled by submission {lease.submission[:12]} already")
    if not lease.submission and digest in state.submissions:  # guard: body-fills-one-lease
        raise Refused("conflict", f"submission {digest[:12]} was sent for another lease already")
    if not lease.submission:
        _refuse_superseded(state, lease)
    return lease


def _refuse_superseded(state: State, lease: LeaseRecord) -> None:
    """A late submission is taken if nobody else was given its blocks and it can still be learned from."""
    stream = state.stream_of(lease)
    if state.phase == "ended":  # guard: nothing-after-the-end
        raise Refused("superseded", "the run has ended: nothing more is learned from rollouts")
    if stream.version - lease.version > state.rules.max_staleness:  # guard: too-old
        raise Refused("superseded", f"lease {lease.id} is for version {lease.version}, too old now: the latest is "
                      f"{stream.version} and max_staleness is {state.rules.max_staleness}")  # fmt: skip
    if lease.status == "overtaken":
        raise Refused(
            "superseded", f"lease {lease.id} took long, and another worker was quicker: this costs you nothing"
        )
    if lease.status == "open":
        return  # others may hold the same blocks: the first that is accepted is paid
    blocks = stream.versions[lease.version].blocks
    # guard: leased-again
    if any(blocks[i].lease != lease.id or blocks[i].status not in ("leased", "free") for i in lease.blocks):
        raise Refused("superseded", f"lease {lease.id} lapsed and its blocks were leased again")


def refuse_other_time(state: State, created: int, now: float, size_bytes: int) -> None:
    """Refuse a submission whose event would get another time than that at which it was signed; a large body takes longer.

    So a host that moves its clock far ahead, to end a lease early, can book no work until the true time has caught up.
    """
    late_s, allowed_s = now - created, BOOKED_WITHIN_S + size_bytes // BODY_WINDOW_BYTES * BODY_WINDOW_S
    if not -BOOKED_WITHIN_S <= late_s <= allowed_s:
        raise Refused("replayed", f"the submission was signed at {created}, but the log is at {now:.0f}: it is "
                      f"{abs(late_s):.0f} s off (limit {allowed_s:.0f}), so sign it again")  # fmt: skip


def cause_of_submission_received(body: SubmissionReceived, here: LogPosition) -> Trigger:
    lease = here.state.leases[body.lease]
    if lease.version in here.links:
        link = bytes.fromhex(here.links[lease.version][1])
        draws = audit_draws(here.state, lease, link)
        order = turns(lease, here.state.validators, link)
        of_turns = turn_draws(lease, here.state.validators, link)
    else:
        (draws, order), of_turns = _said_draws(body, here), {}
    return Trigger(
        Submit(
            body.worker, body.lease, body.digest, body.size_bytes, body.groups, draws, order, here.now,
            body.created, of_turns, body.record,
        )
    )  # fmt: skip


def _said_draws(body: SubmissionReceived, here: LogPosition) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Draws and turns; while their link is secret, what the next event says that they were."""
    for entry in here.entries[here.place + 1 : here.place + 2]:
        if isinstance(entry.body, AuditDrawn):
            return entry.body.draws, entry.body.order
    return (0.0,) * len(body.groups), ()


COMMANDS: Table = {Submit: decide_submit}
CAUSES: Table = {SubmissionReceived: cause_of_submission_received}

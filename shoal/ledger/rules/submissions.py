"""When a submission is taken, and how many of its groups are audited."""

from shoal.ledger.answers import Refused
from shoal.ledger.commands import Submit
from shoal.ledger.entry import Body
from shoal.ledger.facts.submissions import AuditDrawn, SubmissionReceived
from shoal.ledger.past import Cause, Here, Table
from shoal.ledger.rules.members import member_as
from shoal.ledger.seeds import audit_draws, turn_draws, turns
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, Member
from shoal.ledger.turns import by_speed
from shoal.protocol.audits import influence
from shoal.protocol.constants import BODY_WINDOW_BYTES, BODY_WINDOW_S, BOOKED_WITHIN_S
from shoal.protocol.continuations import is_continued, parent_slot


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


def mean_newest_pay(state: State, member: Member) -> float:
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


def cause_of_submission_received(body: SubmissionReceived, here: Here) -> Cause:
    lease = here.state.leases[body.lease]
    if lease.version in here.links:
        link = bytes.fromhex(here.links[lease.version].audit_link)
        draws = audit_draws(here.state, lease, link)
        order = turns(lease, here.state.validators, link)
        of_turns = turn_draws(lease, here.state.validators, link)
    else:
        (draws, order), of_turns = _said_draws(body, here), {}
    return Cause(
        Submit(
            body.worker, body.lease, body.digest, body.size_bytes, body.groups, draws, order, here.now,
            body.created, of_turns, body.record,
        )
    )  # fmt: skip


def _said_draws(body: SubmissionReceived, here: Here) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Draws and turns; while their link is secret, what the next event says that they were."""
    for entry in here.entries[here.place + 1 : here.place + 2]:
        if isinstance(entry.body, AuditDrawn):
            return entry.body.draws, entry.body.order
    return (0.0,) * len(body.groups), ()


COMMANDS: Table = {Submit: decide_submit}
CAUSES: Table = {SubmissionReceived: cause_of_submission_received}
LINES: Table = {}

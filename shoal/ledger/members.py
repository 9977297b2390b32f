"""Nodes of a run: how they join, leave, are quarantined and restored."""

from collections.abc import Iterator

from shoal.ledger.commands import Admin, JoinRun, LeaveRun, Tick
from shoal.ledger.errors import Refused
from shoal.ledger.event import Body, Entry
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.replay_context import LogPosition, PayContext, Table, Trigger
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.state import State
from shoal.ledger.state_records import NodeRecord, SubmissionRecord, TurnsRecord
from shoal.protocol.constants import MAX_OPEN_LEASES
from shoal.protocol.messages import AdminRequest, Join, Message
from shoal.protocol.messages.responses import CreditLine

# --- Membership: nodes join, leave, are quarantined and come back; validators are found at fault ---


class NodeJoined(Message, frozen=True):
    key: str
    role: str
    name: str
    implementation: str
    dtype: str
    device: str
    created: int = 0
    """When the node signed it, seconds since the epoch by its own clock."""


class NodeLeft(Message, frozen=True):
    """A node left by its own signed request. To take part again, it must join again."""

    key: str
    created: int
    """As in `NodeJoined`."""


class NodeQuarantined(Message, frozen=True):
    """A worker gets no leases for a while."""

    node: str
    until: float
    """Seconds since the epoch."""
    cause: str
    submission: str = ""


class NodeRestored(Message, frozen=True):
    """A quarantine ended."""

    node: str


class ValidatorFault(Message, frozen=True):
    validator: str
    submission: str
    cause: str


def apply_node_joined(body: NodeJoined, state: State, entry: Entry) -> None:
    facts = (body.role, body.name, body.implementation, body.dtype, body.device)
    if body.key in state.members:
        member = state.members[body.key]
        member.join_again(facts, max(member.rejoins_until, entry.time) + state.law.rejoin_s)
    else:
        member = state.members[body.key] = NodeRecord(body.key, *facts, turns=TurnsRecord(joined=entry.time))
    member.sign(body.created, left=False)


def apply_node_left(body: NodeLeft, state: State, entry: Entry) -> None:
    state.members[body.key].sign(body.created, left=True)


def apply_node_quarantined(body: NodeQuarantined, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    state.forget(member.until, "quarantine", body.node)
    member.quarantine(body.until, body.submission, body.cause)
    state.expect(body.until, "quarantine", body.node)


def apply_node_restored(body: NodeRestored, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.standing = "new"
    state.forget(member.until, "quarantine", body.node)


def apply_validator_fault(body: ValidatorFault, state: State, entry: Entry) -> None:
    member = state.members[body.validator]
    member.failures += 1
    member.turns.confirmed = 0  # guard: fault-ends-trust
    member.last_reason = body.cause
    if member.failures >= state.law.validator_faults:  # guard: suspension
        member.standing = "suspended"


EVENTS = {
    "node_joined": (NodeJoined, apply_node_joined),
    "node_left": (NodeLeft, apply_node_left),
    "node_quarantined": (NodeQuarantined, apply_node_quarantined),
    "node_restored": (NodeRestored, apply_node_restored),
    "validator_fault": (ValidatorFault, apply_validator_fault),
}


# --- Who may join and act, and when a quarantine ends ---


ASKED_BY_HOST = "the host asked for it"
"""Why a worker is quarantined whose host asked for it."""


def decide_enter(command: JoinRun, state: State) -> list[Body]:
    join, member = command.join, state.members.get(command.key)
    if join.role == "validator" and command.key not in state.validators:  # guard: admitted-validators
        raise Refused("not_admitted", f"validator {command.key[:12]} is not admitted: ask the host to run "
                      f"`shoal admin admit RUN {command.key}`")  # fmt: skip
    if join.role == "trainer" and command.key != state.trainer_key:
        raise Refused("not_admitted", f"{command.key[:12]} is not the trainer key of this run")
    if member and member.standing == "kicked":  # guard: kicked-does-not-join
        raise Refused("kicked", f"the host removed {member.name} ({command.key[:12]}) from this run")
    if member and member.role != join.role:  # guard: one-role-a-key
        raise Refused("conflict", f"{command.key[:12]} joined as a {member.role}: for another role use another key")
    facts, created = (
        (join.role, join.name, join.implementation, join.dtype, join.device),
        command.created,
    )
    if member:
        before = (member.role, member.name, member.implementation, member.dtype, member.device)
        changes = member.left or facts != before
        refuse_replayed(created, member.signed, changes=changes)  # guard: old-join
        if not changes:
            return []
        _refuse_frequent(member, state, command.now)
    if join.role == "worker" and join.dtype != state.rules.dtype:  # guard: worker-dtype
        raise Refused("wrong_dtype", f"this run samples in {state.rules.dtype}, the worker offers {join.dtype}")
    return [NodeJoined(command.key, *facts, created)]


def refuse_replayed(created: int, latest: int, *, changes: bool) -> None:
    """Refuse a request that its key signed before `latest`, its latest one of the same sort, and one that was signed in the
    same second and would change something. So an old request changes nothing, and the same one again gets its first answer.
    """
    # guard: same-second
    if created and (created < latest or (created == latest and changes)):
        raise Refused("replayed", f"this request was signed at {created}, but the same key has sent one that it signed at "
                      f"{latest}: only a later one is taken, so sign it again in a second")  # fmt: skip


def _refuse_frequent(member: NodeRecord, state: State, now: float) -> None:
    """A key joins again and again with other facts: each join is an event, so the log would grow without end."""
    law = state.law
    wait_s = member.rejoins_until - now - (law.rejoins - 1) * law.rejoin_s
    # guard: changed-joins-are-limited
    if wait_s > 0:
        raise Refused("joins_too_often", f"{member.name} ({member.key[:12]}) has joined {law.rejoins} times in a short "
                      f"time, each time after it left or with another name or engine: join again in {wait_s:.0f} s, or "
                      "unchanged")  # fmt: skip


def member_as(state: State, key: str, role: str) -> NodeRecord:
    """A member that may act in a role. Raises `Refused`."""
    member = state.members.get(key)
    if member is None or member.role != role:
        raise Refused("not_joined", f"{key[:12]} has not joined as a {role}: POST /v1/nodes first")
    if member.left:  # guard: left-is-refused
        raise Refused("not_joined", f"{member.name} ({key[:12]}) has left this run: POST /v1/nodes to join again")
    if member.standing == "kicked":  # guard: kicked-is-refused
        raise Refused("kicked", f"the host removed {member.name} ({key[:12]}) from this run")
    if member.standing == "suspended":  # guard: suspended-is-refused
        raise Refused("kicked", f"validator {member.name} ({key[:12]}) was at fault {member.failures} times and is "
                      "suspended: ask the host to look into it")  # fmt: skip
    return member


def quarantine(state: State, worker: str, submission: SubmissionRecord, cause: str, now: float) -> Iterator[Body]:
    """No leases for a while, longer each time. Open leases are taken back, which does not count as a lapse."""
    until = now + state.law.quarantine_s(state.members[worker].failures + 1, state.rules.quarantine_s)
    for held in state.open_leases_of(worker):
        yield LeaseLapsed(held.id, "quarantine")  # guard: quarantine-takes-leases
    if state.members[worker].standing in ("kicked", "suspended"):  # guard: kicked-stays-out
        return  # the end of a quarantine would bring it back
    yield NodeQuarantined(worker, until, cause, submission.digest)


def quarantine_by_host(state: State, member: NodeRecord, now: float) -> Iterator[Body]:
    """The same by the host's request, for the longest time that the law knows, so that a person can look. Nothing for a
    node that gets no leases for half of that anyway."""
    until = now + state.law.max_quarantine_s
    lasting = member.standing == "quarantined" and member.until - now > state.law.max_quarantine_s / 2
    if lasting or member.standing in ("kicked", "suspended"):  # guard: host-quarantines-once
        return
    for held in state.open_leases_of(member.key):
        yield LeaseLapsed(held.id, BY_HOST)
    yield NodeQuarantined(member.key, until, ASKED_BY_HOST)


BY_HOST = "quarantine by host"
"""Why a lease lapsed that the host's quarantine took."""


def restore_served(state: State, now: float) -> list[Body]:
    """Quarantines that are over."""
    served = (state.members[key] for key in state.due_by(now, "quarantine", state.members))
    return [NodeRestored(member.key) for member in served if member.standing == "quarantined"]


def change_by_host(here: LogPosition) -> RulesChanged:
    """The change with which the events of a request end that took a node's leases; an empty one if there is none."""
    changes = (entry.body for entry in here.entries[here.place : here.place + MAX_OPEN_LEASES + 2])
    return next((body for body in changes if isinstance(body, RulesChanged)), RulesChanged())


def cause_of_quarantine_by_host(worker: str, here: LogPosition) -> Trigger | None:
    """The host's request that quarantined a worker; None if the events here are not of one."""
    change = change_by_host(here)
    if change.quarantined != worker:  # guard: quarantine-has-a-cause
        return None
    return Trigger(Admin("quarantine", AdminRequest(worker, evidence=change.evidence), here.now, change.created))


def cause_of_node_quarantined(body: NodeQuarantined, here: LogPosition) -> Trigger | None:
    return cause_of_quarantine_by_host(body.node, here)  # if no decision led to it


def cause_of_node_joined(body: NodeJoined, here: LogPosition) -> Trigger:
    join = Join(body.role, body.name, 0.0, body.implementation, body.dtype, body.device)  # type: ignore[arg-type]
    return Trigger(JoinRun(body.key, join, here.now, body.created))


def cause_of_node_left(body: NodeLeft, here: LogPosition) -> Trigger:
    return Trigger(LeaveRun(body.key, here.now, body.created))


def cause_of_node_restored(body: NodeRestored, here: LogPosition) -> Trigger:
    return Trigger(Tick(here.now))  # if no decision led to it, its time had come


def lines_of_node_quarantined(body: NodeQuarantined, told: PayContext) -> Iterator[CreditLine]:
    if body.node == told.node:
        yield told.line(f"no leases for {body.until - told.entry.time:.0f} s: {body.cause}")


COMMANDS: Table = {JoinRun: decide_enter}
CAUSES: Table = {
    NodeJoined: cause_of_node_joined, NodeLeft: cause_of_node_left, NodeRestored: cause_of_node_restored,
    NodeQuarantined: cause_of_node_quarantined,
}  # fmt: skip
LINES: Table = {NodeQuarantined: lines_of_node_quarantined}

"""Who takes part: nodes join, leave, are quarantined, come back; validators are found at fault."""

from shoal.ledger.entry import Entry
from shoal.ledger.state import State
from shoal.ledger.state_records import Member
from shoal.protocol.types import Message


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
        if facts[2:] != (member.implementation, member.dtype, member.device):
            member.valid_blocks = 0  # another engine has to prove itself first  # guard: new-engine-is-unproven
        member.role, member.name, member.implementation, member.dtype, member.device = facts
        member.rejoins_until = max(member.rejoins_until, entry.time) + state.law.rejoin_s
    else:
        member = state.members[body.key] = Member(body.key, *facts)
        member.turns.joined = entry.time
    member.signed, member.left = body.created or member.signed, False


def apply_node_left(body: NodeLeft, state: State, entry: Entry) -> None:
    member = state.members[body.key]
    member.signed, member.left = body.created or member.signed, True


def apply_node_quarantined(body: NodeQuarantined, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    state.forget(member.until, "quarantine", body.node)
    member.standing, member.until, member.quarantined_for = "quarantined", body.until, body.submission
    member.evidence = {}
    state.expect(body.until, "quarantine", body.node)
    if not member.last_reason.startswith(body.cause):  # else a verdict has told it, with its figures
        member.last_reason = body.cause


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

"""The kinds of events in a run's log, one frozen type each, and how an event becomes bytes with a hash.

Called by the book (which makes and applies them) and by whoever reads a log. It knows no rule of the run:
those are in `decide` and `apply`. Adding a field with a default keeps old logs readable; anything else is a new kind.
"""

from typing import Any

import msgspec

from shoal.protocol.types import EnvSpec, Event, GroupVerdict, Message, Rules, Sampling
from shoal.protocol.wire import WireError, domain_hash, from_json, to_json

GENESIS = "0" * 64
"""`prev` of the first event."""


class RunCreated(Message, frozen=True):
    run: str
    name: str
    run_key: str
    trainer_key: str
    validators: tuple[str, ...]
    chain_end: str
    """End of the chain of slot secrets, hex."""
    audit_chain_end: str
    """End of the second chain, from which audits are drawn."""
    envs: tuple[EnvSpec, ...]
    sampling: Sampling
    rules: Rules
    config: dict[str, Any]
    """The resolved run file without its seed."""


class RulesChanged(Message, frozen=True):
    """The host turned a knob: phase, admission, or a run file's safe keys on resume. Or the run paused itself."""

    phase: str = ""
    admitted_validator: str = ""
    kicked: str = ""
    steps: int = 0
    config: dict[str, Any] = {}
    lease_s: float = 0.0
    cause: str = ""
    """Why the run paused itself: "no signal"."""
    max_flat_groups: int = -1
    """-1 changes nothing."""


class NodeJoined(Message, frozen=True):
    key: str
    role: str
    name: str
    implementation: str
    dtype: str
    device: str


class LeaseGranted(Message, frozen=True):
    lease: str
    worker: str
    version: int
    blocks: tuple[int, ...]
    deadline: float


class LeaseLapsed(Message, frozen=True):
    """A lease ended unfilled."""

    lease: str
    cause: str
    """deadline, returned, quarantine or kicked; stale: its version is too old, which costs nothing; held: the same, but
    beyond the share that is free, and so it counts as lapsed."""


class SubmissionReceived(Message, frozen=True):
    lease: str
    worker: str
    digest: str
    size_bytes: int
    groups: tuple[str, ...]
    """Digest of each group, in the order of the lease's slots."""


class AuditDrawn(Message, frozen=True):
    """How closely a submission is looked at, fixed before anyone has judged it."""

    submission: str
    slots: tuple[int, ...]
    """Drawn for audit; more may be due by the influence that their rewards show, see `audits.must_audit`."""
    rate: float = 1.0
    draws: tuple[float, ...] = ()
    """One for each group, in [0, 1)."""
    mean_influence: float = 0.0
    """Of the groups accepted until now."""
    order: tuple[str, ...] = ()
    """Validators in the order of their turns."""


class VerdictGiven(Message, frozen=True):
    submission: str
    validator: str
    groups: tuple[GroupVerdict, ...]
    projection: str = ""
    """Digest of its projections of the activations, a blob that is private until all have judged."""
    differs_from: tuple[str, ...] = ()
    """Validators who judged before, and whose projections are not of the activations that this one found."""


class Decision(Message, frozen=True):
    """How a submission ended: its blocks accepted and refused."""

    submission: str
    accepted: tuple[int, ...]
    refused: tuple[int, ...]
    disputed: tuple[int, ...] = ()
    """Of the refused: those on which validators differ. No pay, and no blame."""
    recheck: bool = False
    """Whether a second validator judges it again: told only now, so that nobody lies where it is safe."""


class GroupAccepted(Message, frozen=True):
    version: int
    slot: int
    submission: str
    index: int
    digest: str
    tokens: int
    rewards: tuple[float, ...]


class SlotVoid(Message, frozen=True):
    version: int
    slots: tuple[int, ...]
    cause: str


class BatchFormed(Message, frozen=True):
    step: int
    groups: tuple[tuple[int, int], ...]
    """(version, slot) of each member, in canonical order."""


class CheckpointPublished(Message, frozen=True):
    """A new version; or one published before, with the same root, whose manifest was signed again with a later date."""

    version: int
    root: str
    manifest: str
    """Digest of the signed manifest's bytes, which are kept as a blob."""


class LinkRevealed(Message, frozen=True):
    version: int
    link: str
    audit_link: str


class Credit(Message, frozen=True):
    node: str
    version: int
    slot: int
    tokens: int


class Vested(Message, frozen=True):
    """The oldest pay of a node that a slash can no longer take."""

    node: str
    groups: int
    tokens: int


class Forfeited(Message, frozen=True):
    """Pay lost for a refused submission, or for a lapse beyond the free share: the newest groups not yet vested."""

    node: str
    lease: str
    groups: int
    tokens: int
    cause: str
    """What became of the lease: refused or lapsed."""


class Slash(Message, frozen=True):
    """Two validators found a forgery: all of the node's pay that was not vested is gone."""

    node: str
    submission: str
    tokens: int


class Rechecked(Message, frozen=True):
    """How a second look at an accepted submission ended: confirmed, forged, refused or undecided."""

    submission: str
    outcome: str


class ValidatorFault(Message, frozen=True):
    validator: str
    submission: str
    cause: str


class NodeQuarantined(Message, frozen=True):
    node: str
    until: float
    cause: str
    submission: str = ""


class NodeRestored(Message, frozen=True):
    node: str


class RunEnded(Message, frozen=True):
    version: int


Body = (
    RunCreated
    | RulesChanged
    | NodeJoined
    | LeaseGranted
    | LeaseLapsed
    | SubmissionReceived
    | AuditDrawn
    | VerdictGiven
    | Decision
    | GroupAccepted
    | SlotVoid
    | BatchFormed
    | CheckpointPublished
    | LinkRevealed
    | Credit
    | Vested
    | Forfeited
    | Slash
    | Rechecked
    | ValidatorFault
    | NodeQuarantined
    | NodeRestored
    | RunEnded
)

KINDS: dict[str, type[Body]] = {
    "run_created": RunCreated,
    "rules_changed": RulesChanged,
    "node_joined": NodeJoined,
    "lease_granted": LeaseGranted,
    "lease_lapsed": LeaseLapsed,
    "submission_received": SubmissionReceived,
    "audit_drawn": AuditDrawn,
    "verdict_given": VerdictGiven,
    "decision": Decision,
    "group_accepted": GroupAccepted,
    "slot_void": SlotVoid,
    "batch_formed": BatchFormed,
    "checkpoint_published": CheckpointPublished,
    "link_revealed": LinkRevealed,
    "credit": Credit,
    "vested": Vested,
    "forfeited": Forfeited,
    "slash": Slash,
    "rechecked": Rechecked,
    "validator_fault": ValidatorFault,
    "node_quarantined": NodeQuarantined,
    "node_restored": NodeRestored,
    "run_ended": RunEnded,
}

_NAMES = {kind: name for name, kind in KINDS.items()}


class Entry(msgspec.Struct, frozen=True):
    """One event as stored: the bytes are what is hashed, `body` is what they say."""

    seq: int
    time: float
    body: Body
    data: bytes
    hash: str


def make_entry(seq: int, time: float, body: Body, prev: str) -> Entry:
    """Encode an event that follows the one with hash `prev`.

    Raises `WireError` for one that could not be read again: once stored, no replay would get past it.
    """
    data = to_json(Event(seq, time, _NAMES[type(body)], msgspec.Raw(to_json(body)), prev))
    read, _ = read_entry(data)
    return Entry(seq, time, body, data, read.hash)


def read_entry(data: bytes) -> tuple[Entry, str]:
    """Decode stored bytes; returns the entry and the `prev` it claims. Raises `WireError` if they are not an event."""
    event = from_json(data, Event)
    if event.kind not in KINDS:
        raise WireError(f"event {event.seq}: unknown kind {event.kind!r}; a newer shoal wrote this log")
    body = from_json(bytes(event.body), KINDS[event.kind])
    return Entry(event.seq, event.time, body, data, event_hash(data)), event.prev


def kind_of(body: Body) -> str:
    """The name of an event's kind, as stored."""
    return _NAMES[type(body)]


def event_hash(data: bytes) -> str:
    """Hash of an event's stored bytes, hex: the `prev` of the next, and the log's head."""
    return domain_hash("event", data).hex()

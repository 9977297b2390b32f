"""What a log says: the state of a run, as records. Only `ledger/apply` changes it.

Read by the rules, the coordinator's desk and every auditor. A state is a value: two replays of a log give the same
bytes, and `state_hash` says so.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shoal.algos.replay import Evidence
from shoal.ledger.audits import MISSED_TURNS
from shoal.ledger.events import GENESIS
from shoal.protocol.types import EnvSpec, GroupVerdict, Rules, Sampling
from shoal.protocol.wire import digest, to_json

T = TypeVar("T")


class Node(msgspec.Struct):
    """A member of the run. Counts of blocks and groups, credits in policy tokens."""

    key: str
    role: str
    name: str
    implementation: str
    dtype: str
    device: str
    standing: str = "new"
    credits: int = 0
    accepted: int = 0
    refused: int = 0
    lapsed: int = 0
    reasons: dict[str, int] = {}
    leases: int = 0
    """Ever granted: lapses are a share of them."""
    escrow: list[int] = []
    """Tokens of the groups whose pay is not vested, oldest first: what a slash takes."""
    vested: int = 0
    paid_lapses: int = 0
    """Lapsed leases that cost pay."""
    influence: float = 0.0
    """Of its groups that batches took, see `audits.influence`."""
    valid_blocks: int = 0
    """Accepted blocks since the last refused one: decides the audit rate."""
    evidence: dict[str, Evidence] = {}
    """Against the honesty of its sampling over time, each validator's own."""
    failures: int = 0
    """Of a worker: refused submissions so far, each doubles the next quarantine. Of a validator: its faults."""
    until: float = 0.0
    """End of the quarantine, seconds since the epoch."""
    quarantined_for: str = ""
    """The submission that led to it."""
    last_reason: str = ""
    dropped: int = 0
    """Times in a row that leases of it lapsed or were given back, with nothing handed in since."""
    dropped_at: float = 0.0
    """The last of these times, seconds since the epoch."""
    missed: int = 0
    """Of a validator: turns in a row that it let pass while another voted in its place."""
    heard: float = 0.0
    """Of a validator: when it last voted, or was last found missing; seconds since the epoch."""
    stale: int = 0
    """Leases closed without cost because their version became too old; not counted in `lapsed`."""


class Lease(msgspec.Struct):
    """A lease: open, lapsed, stale, submitted or decided."""

    id: str
    worker: str
    version: int
    blocks: tuple[int, ...]
    issued: float
    deadline: float
    status: str = "open"
    submission: str = ""


class Block(msgspec.Struct):
    """A block of a version: free, leased, submitted or done. `lease` is its last holder."""

    status: str
    lease: str
    dropped_by: str = ""
    """Key whose lease of it lapsed last, until somebody hands it in."""
    dropped_at: float = 0.0
    """When that was, seconds since the epoch."""


class Slot(msgspec.Struct):
    """A final slot: signal, flat (all rewards equal) or void; and where its group lies."""

    status: str
    submission: str = ""
    index: int = 0
    digest: str = ""
    rewards: tuple[float, ...] = ()
    tokens: int = 0
    step: int = -1
    """The batch that took it."""


class Submission(msgspec.Struct):
    """A submission and what its receipt says."""

    lease: str
    digest: str
    seq: int
    head: str
    time: float
    groups: tuple[str, ...]
    voted_at: float
    """When the last vote came, or the submission itself."""
    audited: tuple[int, ...] = ()
    rate: float = 1.0
    draws: tuple[float, ...] = ()
    mean_influence: float = 0.0
    order: tuple[str, ...] = ()
    votes: dict[str, tuple[GroupVerdict, ...]] = {}
    """Validators' verdicts in the order in which they came; dropped when no more can follow."""
    projections: dict[str, str] = {}
    """Blob of each validator's projections."""
    differs: list[tuple[str, str]] = []
    """(validator, earlier validator) where the first found other activations than the second claims."""
    decided: bool = False


class Version(msgspec.Struct):
    """A policy version and the work done with it."""

    root: str
    manifest: str
    blocks: dict[int, Block] = {}
    slots: dict[int, Slot] = {}
    revealed: bool = False


class State(msgspec.Struct, dict=True):
    """All that a run remembers. `state_hash` of it is equal for equal logs.

    What `once_per_event` keeps beside the fields is part of neither.
    """

    run: str = ""
    name: str = ""
    run_key: str = ""
    trainer_key: str = ""
    validators: tuple[str, ...] = ()
    chain_end: str = ""
    audit_chain_end: str = ""
    envs: tuple[EnvSpec, ...] = ()
    sampling: Sampling | None = None
    rules: Rules | None = None
    config: dict[str, Any] = {}
    phase: str = "running"
    nodes: dict[str, Node] = {}
    leases: dict[str, Lease] = {}
    submissions: dict[str, Submission] = {}
    versions: dict[int, Version] = {}
    pool: list[tuple[int, int]] = []
    """(version, slot) of accepted groups with signal that no batch has taken, in the order of acceptance."""
    batches: dict[int, tuple[tuple[int, int], ...]] = {}
    issued: int = 0
    """Credits ever issued: the sum of all balances and of what is burned."""
    burned: int = 0
    """Credits slashed and forfeited."""
    influence: float = 0.0
    """Sum over accepted groups: with their number, the mean that audits are measured by."""
    block_tokens: int = 0
    """Policy tokens of accepted groups, and below their number: the mean sizes leases."""
    accepted_groups: int = 0
    flat: int = 0
    """Groups accepted without signal since one with signal, since a batch was formed, and since the run was resumed."""
    flat_reward: float = 0.0
    """Sum of their mean rewards."""
    pause_cause: str = ""
    """Why the run paused itself; empty where the host did."""
    refused: dict[str, int] = {}
    """Refused groups by check."""
    open_leases: list[str] = []
    free: list[tuple[int, int]] = []
    """(version, block) of blocks that were given back, ascending."""
    pending: list[str] = []
    """Submissions without a decision, oldest first."""
    rechecks: list[str] = []
    """Accepted submissions that await a second validator, oldest first."""
    seq: int = -1
    head: str = GENESIS

    @property
    def version(self) -> int:
        """Latest published policy version, -1 before the first."""
        return len(self.versions) - 1

    @property
    def law(self) -> Rules:
        """The rules of a created run."""
        assert self.rules is not None, "the run is not created"
        return self.rules

    def judges(self) -> list[str]:
        """Keys of the validators that take part, sorted."""
        taking_part = (node for node in self.nodes.values() if node.role == "validator")
        return sorted(node.key for node in taking_part if node.standing not in ("kicked", "suspended"))

    def silent(self) -> set[str]:
        """Keys of the validators for whom nobody waits until they vote again; none where all of them are silent."""
        judges = self.judges()
        missing = {key for key in judges if self.nodes[key].missed >= MISSED_TURNS}
        return missing if len(missing) < len(judges) else set()

    def maker_of(self, place: tuple[int, int]) -> str:
        """Key of the worker whose group a (version, slot) holds."""
        version, slot = place
        return self.leases[self.submissions[self.versions[version].slots[slot].submission].lease].worker

    def open_leases_of(self, worker: str) -> list[Lease]:
        """Open leases of a worker, oldest first."""
        return [self.leases[i] for i in self.open_leases if self.leases[i].worker == worker]


def state_hash(state: State) -> str:
    """SHA-256 over the canonical encoding of a state, hex."""
    return digest(to_json(msgspec.to_builtins(state, str_keys=True)))


def once_per_event(count: Callable[[State], T]) -> Callable[[State], T]:
    """A function of a state alone that is computed once for each event, however often it is called.

    The value is kept beside the fields of the state, so it changes no hash. Callers must not change the value.
    """
    name = f"{count.__module__}.{count.__qualname__}"

    @functools.wraps(count)
    def remembered(state: State) -> T:
        seq, value = state.__dict__.get(name, (None, None))
        if seq != state.seq:
            value = count(state)
            state.__dict__[name] = (state.seq, value)
        return value

    return remembered

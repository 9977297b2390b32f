"""Commands: requests to the ledger. A rule decides each: events, or a refusal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from shoal.protocol.constants import MAIN_STREAM, MAX_LEASE_BLOCKS
from shoal.protocol.messages import AdminRequest, Join, Rotation, Verdict


@dataclass(frozen=True)
class AskLease:
    """A worker asks for work and names the leases that it knows it holds."""

    key: str
    holding: tuple[str, ...]
    tokens_per_s: float
    now: float
    most: int = MAX_LEASE_BLOCKS
    """Blocks, at most: auditors ask for as many as the log says were leased."""


@dataclass(frozen=True)
class ReturnLeases:
    """A worker that stops gives back what it did not fill."""

    key: str
    leases: tuple[str, ...]
    now: float
    stopped: int = -1
    """The block in which an environment took too long, or ended its process; -1 if none did."""
    tasks: str = ""
    """As in `LeaseLapsed`."""


@dataclass(frozen=True)
class JoinRun:
    """A node joins."""

    key: str
    join: Join
    now: float
    created: int = 0
    """When the node signed it, seconds since the epoch; 0 if no signed request led to it."""


@dataclass(frozen=True)
class LeaveRun:
    """A node leaves."""

    key: str
    now: float
    created: int = 0
    """As in `Enter`."""


@dataclass(frozen=True)
class Admin:
    """A request of the host, with one of the `ADMIN_ACTIONS`."""

    action: str
    request: AdminRequest
    now: float
    created: int = 0
    """When the host signed it, seconds since the epoch; 0 if no signed request led to it."""


@dataclass(frozen=True)
class Reconfigure:
    """A resumed run with other values of the keys that are safe to change."""

    config: dict[str, Any]
    steps: int
    lease_s: float
    now: float
    max_flat_groups: int = -1
    quarantine_s: float = -1.0


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    now: float
    links: dict[int, tuple[str, str]] = field(default_factory=dict, repr=False)
    """(link, audit link) of versions that an ended run has not revealed."""
    host_hung: tuple[str, ...] = ()
    """Open leases of whose time the host's stage has taken half or more."""
    envs: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """By submission that is overdue, the labels of its slots as in `Judge`."""


@dataclass(frozen=True)
class Submit:
    """A worker's submission for a lease, its body already kept."""

    key: str
    lease: str
    digest: str
    size_bytes: int
    groups: tuple[str, ...]
    draws: tuple[float, ...]
    """One in [0, 1) for each group, from the audit chain: below the audit rate means audited."""
    order: tuple[str, ...]
    """All validators that the host admitted, in the order of their turns, by draws from the same chain."""
    now: float
    created: int = 0
    """When the worker signed it, seconds since the epoch."""
    turn_draws: Mapping[str, float] = field(default_factory=dict)
    """The draws behind `order`, by validator: those of slow ones are raised. Empty if unknown: `order` then holds."""
    record: str | UnsetType = UNSET
    """Digest of the host's record of the lease."""


@dataclass(frozen=True)
class SubmitVerdict:
    """A validator's verdict, with what the coordinator adds."""

    key: str
    verdict: Verdict
    now: float
    projection: str = ""
    recheck: float = 1.0
    """In [0, 1), from the audit chain: below the recheck rate, a second validator judges what this one accepts."""
    differs_from: tuple[str, ...] = ()
    """As in `VerdictGiven`."""
    envs: Mapping[int, str] = field(default_factory=dict)
    """By slot, the label of its environment, in runs with several."""


@dataclass(frozen=True)
class Rotate:
    """The root names another publisher."""

    rotation: Rotation
    now: float


@dataclass(frozen=True)
class Publish:
    """The trainer's new version, its chunks already kept."""

    key: str
    version: int
    root: str
    manifest: str
    links: dict[int, tuple[str, str]] = field(repr=False)
    """(link, audit link) of the versions that this may retire: secret until then."""
    now: float
    stream: str = MAIN_STREAM

"""What may be asked of a run: its commands, and the two ways in which the answer is not an event.

Made by the coordinator's desk, decided in `decide`. A command carries everything that the rules must not fetch
themselves: the time, and every random draw or secret.
"""

from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ShoalError
from shoal.ledger import events as ev
from shoal.protocol.types import Join, Verdict


class Refused(ShoalError):
    """The command is against the rules: an answer for its sender, never an event."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Wait(ShoalError):
    """Nothing to give now: when to come back, and why."""

    def __init__(self, reason: str, retry_s: float) -> None:
        super().__init__(reason)
        self.retry_s = retry_s


@dataclass(frozen=True)
class Create:
    body: ev.RunCreated
    now: float


@dataclass(frozen=True)
class Enter:
    """A node joins."""

    key: str
    join: Join
    now: float


@dataclass(frozen=True)
class AskLease:
    key: str
    holding: tuple[str, ...]
    tokens_per_s: float
    now: float


@dataclass(frozen=True)
class ReturnLeases:
    """A worker that stops gives back what it did not fill."""

    key: str
    leases: tuple[str, ...]
    now: float


@dataclass(frozen=True)
class Submit:
    key: str
    lease: str
    digest: str
    size_bytes: int
    groups: tuple[str, ...]
    draws: tuple[float, ...]
    """One in [0, 1) for each group, from the second secret chain: below the audit rate means audited."""
    order: tuple[str, ...]
    """Of all validators that the host admitted: the order of their turns, by draws from the same chain."""
    now: float


@dataclass(frozen=True)
class Judge:
    key: str
    verdict: Verdict
    now: float
    projection: str = ""
    recheck: float = 1.0
    """In [0, 1), from the audit chain: below the recheck rate a second validator judges what this one accepts."""
    differs_from: tuple[str, ...] = ()
    """As in `events.VerdictGiven`."""


@dataclass(frozen=True)
class Publish:
    key: str
    version: int
    root: str
    manifest: str
    links: dict[int, tuple[str, str]] = field(repr=False)
    """(link, audit link) of the versions that this may retire: a secret until then."""
    now: float


@dataclass(frozen=True)
class Admin:
    action: str
    key: str
    now: float


@dataclass(frozen=True)
class Reconfigure:
    """A resumed run with other values of the keys that are safe to change."""

    config: dict[str, Any]
    steps: int
    lease_s: float
    now: float
    max_flat_groups: int = -1


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    now: float
    links: dict[int, tuple[str, str]] = field(default_factory=dict, repr=False)
    """(link, audit link) of versions that an ended run has not revealed."""


Command = Create | Enter | AskLease | ReturnLeases | Submit | Judge | Publish | Admin | Reconfigure | Tick

"""Answers of the coordinator about a run, its log and its nodes' pay, and the requests of its host.

Auditors read a host's evidence in the log, and the host may be hostile to them, so each part of it has a largest size.
"""

from typing import Annotated, Literal

import msgspec

from shoal.protocol.constants import MAX_MEASURED, MAX_NODES, MAX_STANDING_ALARMS, MIN_LR_FACTOR
from shoal.protocol.field_types import Fact, Message, Response
from shoal.protocol.messages.verdicts import Check

# --- requests of the host ---


# guard: lr-factor-is-bounded
LrFactor = Annotated[float, msgspec.Meta(ge=MIN_LR_FACTOR, le=1.0)]
"""What the run file's learning rate is multiplied by."""

Cause = Annotated[str, msgspec.Meta(pattern=r"\A[a-z_]{1,32}\Z")]
"""Name of a monitor. Any word, because a later shoal may have more monitors."""

Figure = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class Measured(Message, frozen=True):
    """One figure that a monitor looked at."""

    name: Fact
    value: Figure
    limit: Figure


class AlarmEvidence(Message, frozen=True, omit_defaults=True):
    """Why a host acted: the alarm, as its monitors saw it."""

    cause: Cause
    since: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    """Training step at which the alarm was raised."""
    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    """Newest training step that the monitors had seen."""
    # guard: alarm-evidence-is-bounded
    measured: Annotated[tuple[Measured, ...], msgspec.Meta(max_length=MAX_MEASURED)]
    node: Fact = ""
    """Key of the node that it is about, if it is about one."""


class AdminRequest(Message, frozen=True):
    """`POST /v1/admin/{action}`: names a node, by its name or the start of its key, if the action needs one."""

    node: str = ""
    lr_factor: LrFactor | msgspec.UnsetType = msgspec.UNSET
    """Of `rate`: what the run file's learning rate is multiplied by, in steps whose batches are formed from now on."""
    evidence: AlarmEvidence | msgspec.UnsetType = msgspec.UNSET
    """The alarm that led to the request, if one did."""
    also: tuple[str, ...] = ()
    """Of `admit`: further keys, which are admitted with the first one, so that two validators are never a majority."""


# --- the log, and how a run is doing ---


class Event(Message, frozen=True):
    """One line of the log, as stored and hashed: `prev` is the hash of the event before."""

    seq: int
    time: float
    kind: str
    body: msgspec.Raw
    prev: str


class Refusal(Response, frozen=True):
    """Body of every 4xx and 5xx: what happened, why, and what to do."""

    error: str
    code: str
    """Stable word such as "superseded", "too_large", "not_admitted"."""


class CheckAnswer(Response, frozen=True):
    """Answer to `GET /v1/checks`: a submission to judge, or why there is none."""

    check: Check | None
    reason: str


class StandingAlarm(Response, frozen=True):
    """An alarm as anyone may know it: without its node and its figures, which the log has once the host acts on it."""

    cause: Cause
    severity: Literal["notice", "warning", "critical"]
    since: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    """Training step at which it was raised."""


class Status(Response, frozen=True):
    """`GET /v1/status`: how far the run is, and what it waits for."""

    name: str
    phase: str
    version: int
    steps: int
    accepted: int
    """Groups."""
    refused: dict[str, int]
    """Groups by check."""
    in_flight: int
    """Groups leased or not yet judged."""
    pending: int
    """Submissions not yet judged."""
    waiting_for: str
    waiting_s: float
    flat_groups: int = 0
    """Groups accepted in a row without signal: within each, all rewards are equal."""
    flat_reward: float = 0.0
    """Their mean reward."""
    no_signal: str = ""
    """What is said of them, once they are as many as a batch; empty before."""
    unbegun_groups: int = 0
    """Of `flat_groups`: those whose tasks can never begin."""
    unbegun_cause: str = ""
    """Why the last of them cannot."""
    pause_cause: str = ""
    """Why the run paused itself, such as "no signal", or "alarm: CAUSE" by its run file; empty if the host paused it."""
    lr_factor: LrFactor = 1.0
    """The run file's learning rate is multiplied by this in the next batch that is formed."""
    # guard: few-standing-alarms
    alarms: Annotated[tuple[StandingAlarm, ...], msgspec.Meta(max_length=MAX_STANDING_ALARMS)] = ()
    """Those that stand now."""
    # guard: few-unjoined
    unjoined: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Keys of validators that were admitted and have never joined: the last of them."""
    waiting_on: str = ""
    """Whom `waiting_for` is about: host, trainer, validators, workers or nothing."""
    remedy: str = ""
    """What the host may do about it, as sentences without the last stop; empty if nothing is said of it."""

    @property
    def wait_in_words(self) -> str:
        """What is waited for, and what the host may do about it."""
        return f"{self.waiting_for}. {self.remedy}" if self.remedy else self.waiting_for


class StateHash(Response, frozen=True):
    """`GET /v1/state`: what a replay of the log up to `seq` must give."""

    seq: int
    head: str
    state_hash: str


class WriteAck(Response, frozen=True):
    """Answer to a write that returns nothing else."""

    seq: int
    """Number of the log's last event."""


# --- pay ---


class CreditLine(Response, frozen=True):
    """One event that touched a node's pay, and why."""

    seq: int
    """Of the event in the log."""
    time: float
    kind: str
    """Of the event."""
    credits: int
    """Change of the balance, policy tokens; 0 for work that was not paid."""
    detail: str
    """One line for people to read."""
    version: int = -1
    slot: int = -1
    submission: str = ""
    validators: tuple[str, ...] = ()
    """Keys of those who gave the verdicts; empty if the line is about no verdict, or if it is on an earlier page."""
    audited: bool = False
    check: str = ""
    """The check that refused the group; its figure and bound follow."""
    figure: float = 0.0
    bound: float = 0.0


class CreditPage(Response, frozen=True):
    """`GET /v1/nodes/{key}/credits`: a node's pay explained, in the order of the log."""

    node: str
    leases: int
    """All leases that the node was ever granted."""
    lapsed: int
    """How many of them lapsed."""
    lines: tuple[CreditLine, ...]
    after: int
    """To get the next page, ask with this value."""
    more: bool
    """Whether there is a next page."""


class Statement(Message, frozen=True):
    """`GET /v1/nodes/{key}/statement`: a balance, signed by the run key over the statement with an empty signature."""

    run: str
    run_key: str
    """The key that signs. The run's first event names it."""
    node: str
    name: str
    credits: int
    """Balance after event `seq`, policy tokens."""
    seq: int
    head: str
    """Hash of event `seq`: the balance is what replaying the log up to it gives."""
    time: float
    signature: str

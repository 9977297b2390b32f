"""The log's lines, refusals, and the answers of `roles/coordinator` about how a run is doing."""

from typing import Annotated, Literal

import msgspec

from shoal.protocol.constants import MAX_NODES, MAX_STANDING_ALARMS
from shoal.protocol.messages.admin import Cause, LrFactor
from shoal.protocol.messages.base import Fact, Message, Response
from shoal.protocol.messages.verdicts import Check


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


class StateHash(Response, frozen=True):
    """`GET /v1/state`: what a replay of the log up to `seq` must give."""

    seq: int
    head: str
    state_hash: str


class WriteAck(Response, frozen=True):
    """Answer to a write that returns nothing else."""

    seq: int
    """Number of the log's last event."""

"""The host's requests: what an admin call asks, and the evidence for it if an alarm led to it.

Auditors read the evidence in the log, and a host may be hostile to them, so each part of it has a largest size.
"""

from typing import Annotated

import msgspec

from shoal.protocol.constants import MAX_MEASURED, MIN_LR_FACTOR
from shoal.protocol.messages.base import Fact, Message

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

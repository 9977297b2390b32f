"""Rollouts on which an environment failed: what of a group counts without them, and which verdicts may name them.

Pure. Why an environment failed is for `envs/exceptions`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from msgspec import UNSET, UnsetType

from shoal.protocol.messages import Faults, GroupVerdict, fact

T = TypeVar("T")

MIN_LEFT = 2
"""Rollouts that a group needs to be learned from, and at least half of those that it has."""

MAX_FAULT_CHARS = 200
"""Length of what a verdict says of an error: people read it in terminals."""

REPLY_REFUSED = "the policy's chat template or tokenizer does not take its reply"
"""How the error begins of an environment whose reply the policy cannot be shown."""


def without_faults(values_G: Sequence[T], faults: Sequence[int]) -> Sequence[T]:
    """Of the values of a group's rollouts, those that count."""
    return [value for index, value in enumerate(values_G) if index not in faults] if faults else values_G


def has_enough_rollouts(num: int, faults: Sequence[int]) -> bool:
    """Whether a group of so many rollouts has enough that count. Else the few left would decide what all of it teaches."""
    left = num - len(faults)
    return not faults or (left >= MIN_LEFT and 2 * left >= num)  # guard: few-left-teach-nothing


def fault_indices(faults: Faults | UnsetType) -> tuple[int, ...]:
    """Indices of the rollouts that do not count."""
    return faults.rollouts if faults is not UNSET else ()


def fault_key(group: GroupVerdict) -> tuple[object, ...]:
    """What a verdict says of the faults of a group, without the words of the error, which depend on the machine."""
    return (group.faults.rollouts, group.faults.outside, group.faults.score) if group.faults is not UNSET else ()


class FaultReport(Protocol):
    """A replayed rollout, as far as its environment may fail on it."""

    @property
    def fault(self) -> str:
        """What the environment raised, if the rollout counts in nothing because of it; else empty."""
        ...

    @property
    def outside(self) -> float | None:
        """Its score, if that is outside the environment's bounds."""
        ...


def faults_of(replays: Sequence[FaultReport]) -> Faults | UnsetType:
    """What a verdict says of the faults of a group; unset if there are none."""
    failed = tuple(index for index, one in enumerate(replays) if one.fault)
    outside = tuple(index for index, one in enumerate(replays) if one.outside is not None)
    if not failed and not outside:
        return UNSET
    said = next((replays[index].fault for index in failed), "")
    score = next((float(one.outside) for one in replays if one.outside is not None), 0.0)
    return Faults(failed, outside, score, fact(said, MAX_FAULT_CHARS))


def malformed_faults(faults: Faults, num: int) -> str:
    """What no honest validator says of the faults of a group with so many rollouts, as the end of a sentence; empty if
    nothing."""
    for indices in (faults.rollouts, faults.outside):
        rising = all(before < after for before, after in pairwise(indices))
        if not rising or not all(0 <= index < num for index in indices):  # guard: faults-of-its-rollouts
            return f"has faults of other rollouts than its {num}, or not in their order"
    if not (faults.rollouts or faults.outside):  # guard: faults-only-if-some
        return "has faults of no rollout"
    if not math.isfinite(faults.score):  # guard: outside-score-is-a-number
        return "has a score that is not a finite number"
    if len(faults.said) > MAX_FAULT_CHARS or not faults.said.isprintable():  # guard: faults-print
        return f"has an error that is not one line of at most {MAX_FAULT_CHARS} characters"
    return ""

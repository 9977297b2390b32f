"""Which processes play an environment's episodes again, how each differs from the first, and what they answered otherwise.

It starts no process: it compares what two of them recorded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.envs.lint.fake_clock import ELSEWHERE_ZONE, HERE_ZONE
from shoal.envs.lint.finding import CheckResult, differs
from shoal.envs.lint.messages import Recorded
from shoal.envs.lint.scripted_episode import describe_difference
from shoal.envs.lint.worker_process import Failed


class Other(NamedTuple):
    """A process that plays the same actions again, and how it differs from the first."""

    check: str
    cause: str
    remedy: str
    hash_seed: int = 0
    zone: str = HERE_ZONE
    backwards: bool = False
    """Whether it begins with the last task."""


_KEEP_NOTHING = "keep nothing between episodes, neither in globals nor in random's generator"
OTHERS = (
    Other("earlier tasks", "after other tasks,", _KEEP_NOTHING, backwards=True),
    Other(
        "hash seed",
        "with another hash seed,",
        "sort sets before their order counts, and do not use hash()",
        hash_seed=1,
    ),
    Other("clock", "at another date, time and time zone,", "do not ask what time it is", zone=ELSEWHERE_ZONE),
)
LATER = Other("earlier tasks", "after many episodes,", _KEEP_NOTHING, backwards=True)
"""The first process itself, at the end."""


def compare(other: Other, recorded: Sequence[Recorded], told: Any, promised: bool) -> CheckResult:
    """The finding about what another process answered: what it recorded, why it did not, or what it raised. One that is
    slow may have played fewer tasks. `promised`: whether the environment says that it answers alike."""
    if isinstance(told, Exception) and (not isinstance(told, Failed) or told.reason is not None):
        return CheckResult(other.check, "skipped", f"it could not be played again: {told}")
    if not isinstance(told, list):
        return differs(other.check, f"{other.cause} it fails: {told}", promised)
    again = {(task.index, task.heldout): task for task in told}
    played = [(task, again[task.index, task.heldout]) for task in recorded if (task.index, task.heldout) in again]
    for before, after in played:
        if problem := _first_difference(before, after):
            where = f"{'held-out task' if before.heldout else 'task'} {before.index}"
            return differs(other.check, f"{other.cause} {where} {problem}: {other.remedy}", promised)
    if len(played) < min(2, len(recorded)):
        return CheckResult(other.check, "skipped", f"{other.cause} no two tasks were played again in time")
    count = f"{len(played)} of {len(recorded)}" if len(played) < len(recorded) else f"{len(played)}"
    return CheckResult(other.check, "passed", f"{other.cause} {count} tasks give the same replies and scores")


def _first_difference(before: Recorded, after: Recorded) -> str:
    """What two processes answered differently to the same actions; empty if nothing."""
    if before.opens != after.opens:
        return f"opens with {describe_difference(before.opens, after.opens)}"
    if len(before.episodes) != len(after.episodes):
        return f"has {len(before.episodes)} episodes, then {len(after.episodes)}"
    for old, new in zip(before.episodes, after.episodes, strict=True):
        for turn, (reply, other) in enumerate(zip(old.replies, new.replies, strict=False)):
            if reply != other:
                return f"answers turn {turn} with {describe_difference(reply, other)}"
        for turn, (paid, pays) in enumerate(zip(old.earned, new.earned, strict=False)):
            if paid != pays:
                return f"pays for turn {turn} {describe_difference(paid, pays)}"
        if old.end != new.end or len(old.replies) != len(new.replies):
            first, then = (f"{one.end[1]} after {len(one.replies)} turns" for one in (old, new))
            return f"scores {first}, then {then}"
    return ""

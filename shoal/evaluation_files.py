"""Evaluations on held-out tasks as a run's folder has them: a file for each, which `jobs/evaluate` writes.

It does not know how a policy is evaluated.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from shoal.terminal import brief

BEFORE, AFTER = "before", "after"
"""Names of the evaluations of the first version and of the final one."""

MAX_FAULT_SHARE = 0.05
"""Share of episodes without a score above which a mean is compared with no other: a policy that makes the environment fail
where it would lose has a higher mean."""

FEW_FAULTS = 2
"""So many are never too many: of a few episodes, one is a large share, and moves the mean by less than its noise."""


class Judged(msgspec.Struct, frozen=True):
    """What a held-out judge says of an evaluation's episodes, with its 95 % confidence interval."""

    mean: float | None
    """Share of successes if the judge says what succeeds, otherwise its mean reward; None as in `Heldout`."""
    low95: float | None
    high95: float | None
    fault: str = ""
    """What the judge raised first; empty if nothing. An episode on which it fails has no part in the mean."""
    episodes: int = 0
    """Of the evaluation."""
    faults: int = 0
    """Of these, without a score by the judge: it failed on them, or the environment did."""


class Heldout(msgspec.Struct, frozen=True):
    """An evaluation on held-out tasks, with its 95 % confidence interval."""

    mean: float | None
    """Over the episodes that have a score; None if an environment failed on all of its own."""
    low95: float | None
    high95: float | None
    episodes: int
    envs: dict[str, "Heldout"] = {}
    """By label, where a run has several environments."""
    judge: Judged | None = None
    """If the run file names one."""
    measure: str = ""
    """What the mean is of: success, or reward."""
    faults: int = 0
    """Episodes without a score, because the environment failed on them, or their prompt leaves no room for a turn."""


class Figures(Protocol):
    """What both of these have."""

    @property
    def mean(self) -> float | None: ...
    @property
    def low95(self) -> float | None: ...
    @property
    def high95(self) -> float | None: ...


def interval_of(found: Figures | None) -> tuple[float, float, float] | None:
    """Mean, and its 95 % interval; None of what has no mean."""
    if found is None or found.mean is None or found.low95 is None or found.high95 is None:
        return None
    return found.mean, found.low95, found.high95


def format_of(found: Figures) -> str:
    """How its mean is written: a share in per cent, a mean of rewards as it is."""
    parts = [found, *getattr(found, "envs", {}).values()]
    is_reward = any(getattr(part, "measure", "") == "reward" for part in parts)
    outside = any(not 0 <= one <= 1 for one in interval_of(found) or ())
    return ".3f" if is_reward or outside else ".1%"


class HasFaults(Protocol):
    """An evaluation, or what a judge says of it, with its faults; any class of this form."""

    @property
    def episodes(self) -> int: ...
    @property
    def faults(self) -> int: ...


def why_no_mean(found: Heldout) -> str:
    """Of an evaluation whose mean is None: which environment has no score."""
    label, part = next(((label, one) for label, one in found.envs.items() if one.mean is None), ("", found))
    return f"none of {part.episodes:,} episodes{f' of {brief(label)}' if label else ''} has a score"


def why_not_comparable(*evaluations: HasFaults) -> str:
    """Why the means of evaluations are not compared, if too many episodes of one have no score; else empty."""
    for one in evaluations:
        for label, part in {"": one, **getattr(one, "envs", {})}.items():
            if part.faults > max(FEW_FAULTS, MAX_FAULT_SHARE * part.episodes):  # guard: faults-raise-no-mean
                of = f" of {brief(label)}" if label else ""
                return (
                    f"no comparison, because {part.faults:,} of {part.episodes:,} held-out episodes{of} have no score, "
                    f"more than {100 * MAX_FAULT_SHARE:g} %, and so no part in the mean"
                )
    return ""


def read_heldout(path: Path) -> Heldout | None:
    """An evaluation, if its file is there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Heldout)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def evaluations_in(folder: Path) -> list[str]:
    """Names that evaluations have in a run's folder, oldest version first; not all need to be there."""
    found = (path.stem for path in folder.glob("v*.json"))
    return [BEFORE, *sorted(name for name in found if version_of(name) is not None), AFTER]


def version_of(name: str, final: int | None = -1) -> int | None:
    """The version of an evaluation or of a checkpoint, by its name, such as v000025; `final` is the last one's, None if
    it is not known. None of any other name, such as of a copy that somebody left beside it."""
    if name in (BEFORE, AFTER):
        return 0 if name == BEFORE else final
    digits = name[1:]
    # int() refuses very long texts, and takes signs, spaces, underscores and digits of other scripts.
    sound = name.startswith("v") and digits.isascii() and digits.isdecimal() and len(digits) < 20  # guard: stray-names
    return int(digits) if sound else None


def _label(name: str) -> str:
    return name if name in (BEFORE, AFTER) else f"v{version_of(name)}"


def results_in(folder: Path) -> tuple[tuple[str, Heldout], ...]:
    """The evaluations in a run's folder for them, oldest version first."""
    found = [(name, read_heldout(folder / f"{name}.json")) for name in evaluations_in(folder)]
    return tuple((_label(name), heldout) for name, heldout in found if heldout is not None)

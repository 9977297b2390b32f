"""Evaluations on held-out tasks as a run's folder has them: a file for each, which `roles/evaluate` writes.

Read by the launcher, the coordinator's metrics and the role that feeds loggers. It does not know how a policy is evaluated.
"""

from pathlib import Path

import msgspec

BEFORE, AFTER = "before", "after"
"""Names of the evaluations of the first version and of the final one."""


class Judged(msgspec.Struct, frozen=True):
    """What a held-out judge says of an evaluation's episodes, with its 95 % confidence interval."""

    mean: float
    """Share of successes if the judge says what succeeds, otherwise its mean reward."""
    low95: float
    high95: float
    fault: str = ""
    """What the judge raised first; empty if nothing."""


class Heldout(msgspec.Struct, frozen=True):
    """An evaluation on held-out tasks, with its 95 % confidence interval."""

    mean: float
    low95: float
    high95: float
    episodes: int
    envs: dict[str, "Heldout"] = {}
    """By label, where a run has several environments."""
    judge: Judged | None = None
    """If the run file names one."""


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


def version_of(name: str, final: int = -1) -> int | None:
    """The version that an evaluation or a checkpoint is of, by its name, such as v000025; `final` is the last one's. None
    of any other name, such as of a copy that somebody left beside it."""
    if name in (BEFORE, AFTER):
        return 0 if name == BEFORE else final
    digits = name[1:]
    # int() refuses very long texts, and takes signs, spaces, underscores and digits of other scripts.
    sound = name.startswith("v") and digits.isascii() and digits.isdecimal() and len(digits) < 20  # guard: stray-names
    return int(digits) if sound else None

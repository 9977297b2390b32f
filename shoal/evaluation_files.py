"""Evaluations on held-out tasks: the record, the files of a run's folder, and when two means are compared."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.terminal import brief

BEFORE, AFTER = "before", "after"
"""Names of the evaluations of the first version and of the final one."""

MAX_FAULT_SHARE = 0.05
"""Share of episodes without a score above which a mean is compared with no other: a policy that makes the environment fail
where it would lose has a higher mean."""

FEW_FAULTS = 2
"""So many are never too many: of a few episodes, one is a large share, and moves the mean by less than its noise."""


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95 % confidence interval."""

    mean: float
    low95: float
    high95: float


class Transcript(msgspec.Struct, frozen=True):
    """One episode, for people to read."""

    task: str
    turns: tuple[tuple[str, str], ...]
    """Author and text: policy, a seat, or the chat role of a message of the environment."""
    score: float | None
    """None if the environment failed on it."""
    success: bool | None
    ending: str
    tokens: int
    """Tokens that the policy wrote."""
    fault: str = ""
    """What the environment raised; empty if nothing."""


class JudgeResult(msgspec.Struct, frozen=True):
    """What a held-out judge says of an evaluation's episodes, with its 95 % confidence interval."""

    mean: float | None
    """Share of successes if the judge says what succeeds, otherwise its mean reward; None if no episode has a score."""
    low95: float | None
    high95: float | None
    fault: str = ""
    """What the judge raised first; empty if nothing. An episode on which it fails has no part in the mean."""
    episodes: int = 0
    """Of the evaluation."""
    faults: int = 0
    """Of these, without a score by the judge: it failed on them, or the environment did."""


class Evaluation(msgspec.Struct, frozen=True):
    """The figures of one evaluation; of a run with several environments, their mean for tasks as the run draws them."""

    mean: float | None
    """Success rate if the environment says what succeeds, otherwise mean reward: see `measure`. Over the episodes that have
    a score: None if an environment failed on all of its own."""
    low95: float | None
    high95: float | None
    episodes: int
    envs: dict[str, "Evaluation"] = {}
    """By label, in a run with several environments."""
    measure: Literal["", "success", "reward"] = ""
    tasks: Literal["", "heldout", "training"] = ""
    """Training tasks only if the environment has no held-out tasks."""
    reward: Interval | None = None
    success: Interval | None = None
    tokens: int = 0
    """Tokens that the policy wrote in all episodes."""
    endings: dict[str, int] = {}
    fault: str = ""
    """What the environment raised first; empty if nothing."""
    transcripts: tuple[Transcript, ...] = ()
    parts: dict[str, float] = {}
    """Mean of each part of the reward, before its weight."""
    metrics: dict[str, float] = {}
    """Mean of what the environment reports beside the reward."""
    solve_rates: tuple[float, ...] = ()
    """Of each task on which the environment did not always fail: the share of its episodes that succeeded, or its mean
    reward within the range."""
    judge: JudgeResult | None = None
    """What a held-out judge says of the same episodes, if the run file names one."""
    faults: int = 0
    """Episodes without a score, because the environment failed on them, or their prompt leaves no room for a turn. They
    count in `endings` and `tokens` alone."""
    name: str = ""
    """Of its file: before, after, or v000012 for a checkpoint during training."""
    version: int = -1
    """Of the policy, if it was read from a run; -1: unknown."""

    def figures(self) -> dict[str, Any]:
        """What a report of stages has of it."""
        kept = ("mean", "low95", "high95", "episodes", "judge", "measure", "faults")
        return {key: getattr(self, key) for key in kept} | {
            "envs": {env: one.figures() for env, one in self.envs.items()}
        }

    def as_file(self) -> dict[str, Any]:
        """What is written of it: of several environments, their figures and no others."""
        values = msgspec.structs.asdict(self)
        if not self.envs:
            return {key: value for key, value in values.items() if key not in ("envs", "name", "version")}
        kept = ("mean", "low95", "high95", "episodes", "envs", "judge", "faults")
        return {key: values[key] for key in kept} | {"envs": {env: one.as_file() for env, one in self.envs.items()}}


def interval_of(found: Evaluation | JudgeResult | None) -> tuple[float, float, float] | None:
    """Mean, and its 95 % interval; None of what has no mean."""
    if found is None or found.mean is None or found.low95 is None or found.high95 is None:
        return None
    return found.mean, found.low95, found.high95


def format_of(found: Evaluation | JudgeResult) -> str:
    """How its mean is written: a share in per cent, a mean of rewards as it is."""
    parts = [found, *getattr(found, "envs", {}).values()]
    is_reward = any(getattr(part, "measure", "") == "reward" for part in parts)
    outside = any(not 0 <= one <= 1 for one in interval_of(found) or ())
    return ".3f" if is_reward or outside else ".1%"


def why_no_mean(found: Evaluation) -> str:
    """Of an evaluation whose mean is None: which environment has no score."""
    label, part = next(((label, one) for label, one in found.envs.items() if one.mean is None), ("", found))
    return f"none of {part.episodes:,} episodes{f' of {brief(label)}' if label else ''} has a score"


def why_not_comparable(*evaluations: Evaluation | JudgeResult) -> str:
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


def read_evaluation(path: Path) -> Evaluation | None:
    """An evaluation, if its file is there and whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def evaluations_of(files: Mapping[str, bytes], newest: int | None, private: bool) -> list[Evaluation]:
    """The evaluations in files by name, by version; `newest` is that of the final policy, whose evaluation is left out if
    it is None. Transcripts only if `private`."""
    found = []
    for name, data in files.items():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if (version := version_of(name, newest)) is None:
                continue
            whole = msgspec.json.decode(data, type=Evaluation)
            told = whole if private else _without_transcripts(whole)  # guard: held-out-tasks-stay-private
            found.append(msgspec.structs.replace(told, name=name, version=version))
    return sorted(found, key=lambda one: (one.version, one.name == AFTER))


def _without_transcripts(one: Evaluation) -> Evaluation:
    envs = {label: _without_transcripts(part) for label, part in one.envs.items()}
    judge = one.judge and msgspec.structs.replace(one.judge, fault="")  # it may quote a task
    return msgspec.structs.replace(one, transcripts=(), envs=envs, judge=judge, fault="")


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


def results_in(folder: Path) -> tuple[tuple[str, Evaluation], ...]:
    """The evaluations in a run's folder for them, oldest version first."""
    found = [(name, read_evaluation(folder / f"{name}.json")) for name in evaluations_in(folder)]
    return tuple(
        (name if name in (BEFORE, AFTER) else f"v{version_of(name)}", one) for name, one in found if one is not None
    )

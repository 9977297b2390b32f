"""Evaluations on held-out tasks, as a run's folder holds them.

`jobs/evaluate` writes the files. A file that is not whole, or of another form, is left out.
"""

import contextlib
from collections.abc import Mapping

import msgspec

from shoal.evaluation_files import Judged, version_of


class ReadTranscript(msgspec.Struct, frozen=True):
    """One episode, for people to read."""

    task: str
    turns: tuple[tuple[str, str], ...]
    """Author and text: policy, a seat, or the chat role of a message of the environment."""
    score: float | None
    success: bool | None
    ending: str
    tokens: int
    fault: str = ""
    """What the environment raised; such an episode has no score."""


class HeldOut(msgspec.Struct, frozen=True):
    """An evaluation, with its 95 % confidence interval."""

    mean: float | None
    """Over the episodes that have a score; None if the environment failed on all."""
    low95: float | None
    high95: float | None
    episodes: int
    measure: str = ""
    """success or reward: what the mean is of."""
    tasks: str = ""
    """heldout, or training where an environment has no held-out tasks."""
    endings: dict[str, int] = {}
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    envs: dict[str, "HeldOut"] = {}
    """By label, in a run with several environments."""
    judge: Judged | None = None
    """What a held-out judge says of the same episodes, if the run has one."""
    transcripts: tuple[ReadTranscript, ...] = ()
    name: str = ""
    """before, after, or v000012 for a checkpoint on the way."""
    version: int = -1
    faults: int = 0
    """Episodes without a score, because the environment failed on them."""


def read_heldout(files: Mapping[str, bytes], newest: int | None, private: bool) -> list[HeldOut]:
    """The evaluations in these files, by version; `newest` is that of the final policy, whose evaluation is left out if
    it is None. Transcripts only if `private`."""
    found = []
    for name, data in files.items():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if (version := version_of(name, newest)) is None:
                continue
            whole = msgspec.json.decode(data, type=HeldOut)
            told = whole if private else _without_transcripts(whole)  # guard: held-out-tasks-stay-private
            found.append(msgspec.structs.replace(told, name=name, version=version))
    return sorted(found, key=lambda one: (one.version, one.name == "after"))


def _without_transcripts(one: HeldOut) -> HeldOut:
    envs = {label: _without_transcripts(part) for label, part in one.envs.items()}
    judge = one.judge and msgspec.structs.replace(one.judge, fault="")  # it may quote a task
    return msgspec.structs.replace(one, transcripts=(), envs=envs, judge=judge)

"""What a process in which an environment is checked may answer, read as a stranger's bytes.

The environment's code shares that process and can write what it likes in the process's name. So an answer of another form
ends the check with a finding, and what can be seen on our side is not believed from there: the names of the checks, and
whether two recordings are the same.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from shoal.envs.lint.checks import ALWAYS, SOMETIMES

Seen = tuple[tuple[Literal["network", "processes", "files", "import"], str, str], ...]
"""Kind, words and place of what the environment did."""

CALL = b"\x01"
"""How a message begins that names the call which the environment's code now is in. All others are JSON."""

T = TypeVar("T")


class LoadRequest(msgspec.Struct):
    """Which environment a process loads, and how."""

    name: str
    settings: dict[str, Any] | None
    """What a run file adds."""
    args: dict[str, Any]
    sources: list[str]
    """Its files or folders."""
    reproducible: bool
    refuses: bool
    """Whether it must do without network, processes and files."""
    call_s: float
    """Time for one call of the environment."""
    elsewhere: bool = False
    """Whether another clock is shown to it."""


class MalformedReply(Exception):
    """An answer that our end of the process does not write. The text is the end of a sentence."""


class LintFailure(msgspec.Struct, forbid_unknown_fields=True):
    """A request could not be answered, or, with `stuck`, did not end."""

    failed: str = ""
    stuck: str = ""
    seen: Seen = ()


class LoadedEnv(msgspec.Struct, forbid_unknown_fields=True):
    """What an environment is."""

    checks: tuple[str, ...]
    promised: bool
    """Whether its replies are reproducible, as file and class say."""
    by_class: bool
    """As the class says."""


class WorkerReply(NamedTuple):
    """The finding of one check."""

    outcome: Literal["passed", "failed", "skipped"]
    detail: str


class LintEpisode(msgspec.Struct, forbid_unknown_fields=True):
    """One episode of a task."""

    actions: list[str]
    replies: list[str | list[str] | None]
    end: tuple[bool, float, bool | None]
    """Whether it was done, the score, and the success."""
    earned: list[list[float]] = []
    """Of each turn: what it earns, then the end and the reward of each step in it."""


class Recorded(msgspec.Struct, forbid_unknown_fields=True):
    """A task, and what the environment said in it."""

    index: int
    heldout: bool
    opens: list[str]
    episodes: list[LintEpisode]
    prompt: Any = None
    """Messages of the opening, arguments of the chat template, and the environment's `max_tokens`; None if not JSON."""


def read(data: bytes, kind: type[T]) -> T | LintFailure:
    """The answer to a request that is answered by `kind`. Raises `MalformedReply`."""
    try:
        tree = json.loads(data)
        is_value = isinstance(tree, Mapping) and list(tree) == ["value"]
        told: Any = msgspec.convert(tree["value"], kind) if is_value else msgspec.convert(tree, LintFailure)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise MalformedReply(
            f"gave an answer of another form ({str(error)[:100]})"
        ) from None  # guard: frames-of-a-check
    if isinstance(told, LintFailure) and not (told.failed or told.stuck):
        raise MalformedReply("gave an empty answer")
    return told


def names_of(loaded: LoadedEnv) -> Sequence[str]:
    """The checks that an environment gets. Raises `MalformedReply` if one that all get is missing."""
    names = [name for name in (*ALWAYS, *SOMETIMES) if name in loaded.checks]
    if len(names) != len(loaded.checks) or not set(ALWAYS) <= set(names):  # guard: no-check-is-left-out
        raise MalformedReply(f"named other checks ({', '.join(loaded.checks)[:100]})")
    return names


def demand_episodes(recorded: Sequence[Recorded]) -> None:
    """Raise `MalformedReply` unless each task was recorded once, with an episode and a score."""
    tasks = {(task.index, task.heldout) for task in recorded}
    whole = all(task.episodes and all(math.isfinite(one.end[1]) for one in task.episodes) for task in recorded)
    if not recorded or len(tasks) < len(recorded) or not whole:  # guard: a-check-plays-episodes
        raise MalformedReply("recorded no episodes, or a task twice")

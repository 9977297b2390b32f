"""Calls of an environment: its tasks, players, solutions and scores, and its faults in one line.

An author sees `shoal.env` alone. This is for the rooms that play, check and evaluate environments.
"""

import inspect
import math
import random
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from shoal.chat.messages import arguments_of
from shoal.env import Env, HasSuccess, Player, Score, Scripted, Solved, State, Step, Task
from shoal.envs.exceptions import LOCAL_ERRORS, RewardOutOfBounds
from shoal.errors import MessagesRefused, ShoalError, Undecided

MAX_NAMED = 64
"""Limit on the parts of one score, and on its metrics."""

MAX_NAME = 64
"""Limit on the characters in the name of a part or a metric."""

ROUNDING = 1e-9
"""Of the width of the bounds: a score that is less far outside is taken as the bound, because sums are rounded."""

SHOAL = Path(__file__).parents[1]
PLACES = (SHOAL / "envs", SHOAL / "graders", SHOAL / "env.py")
"""Code of ours that answers for an environment. What it raises is said to be raised where the environment called it."""


OPTIONAL = ("truncated_score", "group_scores", "success", "players", "solution")
"""Methods that an environment need not have."""


class EnvFacts(msgspec.Struct, frozen=True, tag=True):
    """What an environment says of itself, read once. One in another process sends it as its first message."""

    name: str
    """What a run calls it: its own name, or its label."""
    num_tasks: int
    num_heldout: int
    reward_bounds: tuple[float, float]
    members: tuple[str, ...]
    """The methods in OPTIONAL that it has."""
    players: tuple[str, ...]
    """Names of its scripted players, where these play in another process."""
    num_seats: int
    max_turn_tokens: int
    max_tokens: int
    parser: str
    history: str
    reproducible: bool
    tools: list[dict[str, Any]]
    template: dict[str, Any]
    weights: dict[str, float]
    """Of the parts of a score, by name. A part without one has weight 1."""
    answer_in_prompt: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the chat template."""
        return arguments_of(self)


def describe(env: Env) -> EnvFacts:
    """The facts that a proxy of an environment carries, or what the environment itself says. Raises `TypeError` for a
    member that is not of its kind."""
    facts = getattr(env, "facts", None)
    if isinstance(facts, EnvFacts):
        return facts
    own: Any = env
    low, high = _member(own.reward_bounds, "reward_bounds", tuple[float, float], "the lowest and the highest reward")
    tools = _member(getattr(own, "tools", ()), "tools", list[dict[str, Any]], "a list of JSON schemas")
    template = _member(getattr(own, "template", {}), "template", dict[str, Any], "values of JSON by name")
    weights = _member(getattr(own, "weights", {}), "weights", dict[str, float], "a number for each part of the score")
    return EnvFacts(
        str(own.name), _count(env, "num_tasks"), _count(env, "num_heldout"), (low, high),
        tuple(name for name in OPTIONAL if has_member(env, name)), (), _count(env, "num_seats", 1),
        _count(env, "max_turn_tokens"), _count(env, "max_tokens"), str(getattr(own, "parser", "")),
        str(getattr(own, "history", "append")), bool(getattr(own, "reproducible", True)), tools, template, weights,
        bool(getattr(own, "answer_in_prompt", False)),
    )  # fmt: skip


def has_member(env: Env, name: str) -> bool:
    """Whether an environment has one of the methods in OPTIONAL."""
    facts = getattr(env, "facts", None)
    return name in facts.members if isinstance(facts, EnvFacts) else callable(getattr(env, name, None))


def _member(value: Any, name: str, kind: Any, wanted: str) -> Any:
    """The value of a member as JSON would give it back."""
    try:
        return msgspec.convert(msgspec.to_builtins(value, enc_hook=_number), kind)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise TypeError(f"{name} is {value!r:.40}; give {wanted}") from None


def _number(value: Any) -> float:
    """A number of numpy or torch as one of Python."""
    if not isinstance(value, Real):
        raise TypeError
    return float(value)


def _count(env: Env, name: str, default: int = 0) -> int:
    number = getattr(env, name, default)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} is {number!r:.40}; give a whole number")
    return number


class AuthorError(Exception):
    """What an environment raised in another process, as one line that says where."""


class NoText(ShoalError):
    """A scripted player returned something else than a text."""


_SAID = (AuthorError, MessagesRefused, Undecided, NoText)
"""Their texts say all: the place in the code says no more."""


def step_of(told: object) -> Step:
    """What an environment's `step` returned. Raises `TypeError` if it is no `Step`, or a tuple like one."""
    if not isinstance(told, tuple | list):
        raise TypeError(f"step() must return Step(state, reply, done), not {type(told).__name__}")
    if not 3 <= len(told) <= len(Step._fields):
        raise TypeError(f"step() must return Step(state, reply, done), not {len(told)} values")
    return Step(*told)


class ShapedTask(NamedTuple):
    """A task whose prompt asks for a length, in a run that shapes rewards by it. The environment sees the task alone."""

    task: Task
    tokens: int
    """The length that the prompt asks for."""


def unshaped(task: Task) -> Task:
    """A task as the environment itself knows it."""
    return task.task if isinstance(task, ShapedTask) else task


def make_task(env: Env, index: int, heldout: bool = False) -> Task:
    """What the environment gives for an index. One without held-out tasks need not know that there are some."""
    return env.task(index, heldout=True) if heldout else env.task(index)


def task_of(env: Env, index: int, heldout: bool = False) -> Task:
    """The task with this index. Raises as `wrap_env_errors`."""
    kind = "held-out task" if heldout else "task"
    with wrap_env_errors(env, f"environment {label_of(env)} cannot make {kind} {index}", "Fix it, or num_tasks"):
        return make_task(env, index, heldout)


@contextmanager
def wrap_env_errors(env: Env, what: str, remedy: str) -> Iterator[None]:
    """Raise a one-line `ShoalError` for anything that the environment's code raises, but what says something about this
    machine alone as it is."""
    try:
        yield
    except LOCAL_ERRORS:
        raise  # guard: overreach-fails-no-task
    except (Exception, SystemExit) as error:  # noqa: BLE001  foreign code may raise anything: its user gets one line
        raise ShoalError(f"{what}: {describe_fault(error, source_of(env))}. {remedy}") from None


def players_of(env: Env) -> Mapping[str, Player]:
    """The scripted players; empty if there are none. They raise `NoText`."""
    if not has_member(env, "players"):
        return {}
    return {name: partial(_text_of, name, player) for name, player in cast(Scripted, env).players().items()}


def _text_of(name: str, player: Player, state: State, rng: random.Random) -> str:
    told: object = player(state, rng)
    if not isinstance(told, str):
        raise NoText(
            f"a player returns a text, and the player {name} returned {type(told).__name__}: let it write tool calls and "
            "thoughts as the policy writes them"
        )
    if re.search("[\ud800-\udfff]", told):
        raise NoText(f"a player returns a text, and the player {name} returned half of a surrogate pair: {told!r:.60}")
    return told


def solution_of(env: Env, task: Task) -> tuple[str, ...] | None:
    """The turns of a task's solution; None if the environment gives none."""
    if not has_member(env, "solution"):
        return None
    found: Any = cast(Solved, env).solution(unshaped(task))
    return (found,) if isinstance(found, str) else None if found is None else tuple(found)


def is_decided(env: Env) -> bool:
    """Whether an environment says which episodes are won, as a `HasSuccess` does."""
    return has_member(env, "success")


def success_of(env: Env, state: State) -> bool | None:
    """Whether the episode is a success, or None if the environment does not say."""
    return bool(cast(HasSuccess, env).success(state)) if is_decided(env) else None


def compares(env: Env) -> bool:
    """Whether an environment compares an answer with its siblings, as a `GroupScoring` does."""
    return has_member(env, "group_scores")


def source_of(env: Env) -> Path | None:
    """The Python file that defines the environment's class, or that it names as `source`, if it is known."""
    env = getattr(env, "env", env)  # under settings
    if isinstance(named := getattr(env, "source", None), Path):
        return named
    file = getattr(sys.modules.get(type(env).__module__), "__file__", None)
    return Path(file) if file else None


def label_of(env: Env) -> str:
    """What a run calls an environment: two of one class have the same name, and other labels."""
    facts = getattr(env, "facts", None)
    return facts.name if isinstance(facts, EnvFacts) else str(env.name)


def describe_fault(error: BaseException, source: Path | None) -> str:
    """One line: what an environment raised and where, at its deepest line in `source`, or else the deepest of all."""
    if isinstance(error, _SAID):
        return str(error) or "it does not say why"  # guard: faults-are-said
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if source is not None and frame.filename == str(source)] or frames
    place = f"{inside[-1].filename} line {inside[-1].lineno}: " if inside else ""
    return f"{place}{_in_one_line(error)}"


def describe_fault_of_call(error: BaseException, env: Env, name: str, source: Path | None) -> str:
    """The same of a call of an environment. If it returned what is refused here, the place is where its author wrote it.
    Whoever shows it says the environment's label, which it does not know itself."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and any(Path(frames[-1].filename).is_relative_to(place) for place in PLACES)
    if isinstance(error, _SAID) or not is_ours or str(source) in {frame.filename for frame in frames}:
        return describe_fault(error, source)
    code = getattr(inspect.unwrap(getattr(getattr(env, "env", env), name, describe_fault)), "__code__", None)
    line = f"{source} line {code.co_firstlineno}: " if code is not None and code.co_filename == str(source) else ""
    return f"{line}{name}(): {_in_one_line(error)}"


def _in_one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # noqa: BLE001  foreign code may raise anything
        text = f"its text raises {type(second).__name__}"
    return f"{type(error).__name__}{': ' + text if text else ''}"


# --- scores ---


class Earned(NamedTuple):
    """A reward, and where it comes from."""

    reward: float
    parts: dict[str, float]
    """Not multiplied by their weights. Empty if the environment gives a number."""
    metrics: dict[str, float]


def earned(env: Env, scored: Sequence[Any], turn_rewards: Sequence[float] = ()) -> Earned:
    """The reward: the sum of the scores and of the turns' rewards. Parts of the same name are added.

    Raises `RewardOutOfBounds` if the reward is outside the environment's bounds, and ValueError if it is not finite.
    """
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    terms = finite_rewards(turn_rewards)
    facts = describe(env)
    for score in scored:
        if isinstance(score, Score):
            for name, value in _named(score.parts, "part"):
                parts[name] = parts.get(name, 0.0) + value
                terms.append(value * facts.weights.get(name, 1.0))
            metrics.update(_named(score.metrics, "metric"))
        else:
            terms.append(number_of(score, "the score"))
    low, high = facts.reward_bounds
    reward = terms[0] if len(terms) == 1 else math.fsum(terms)
    if not math.isfinite(reward):
        raise ValueError(f"the score is {reward}, not a finite number")
    if not low <= reward <= high:
        near = min(max(reward, low), high)
        if abs(reward - near) <= ROUNDING * (high - low):
            return Earned(near, parts, metrics)
        raise RewardOutOfBounds(reward, low, high)
    return Earned(reward, parts, metrics)


def finite_rewards(turn_rewards: Sequence[Any]) -> list[float]:
    """What turns earn, without those that earn nothing. Raises if one is no finite number."""
    return [_finite(reward, "the reward of a step") for reward in turn_rewards if reward]


def _named(values: Mapping[str, float], what: str) -> list[tuple[str, float]]:
    if len(values) > MAX_NAMED:
        raise ValueError(f"{len(values)} {what}s in a score, limit {MAX_NAMED}")
    for name in values:
        if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()):
            raise ValueError(f"{what} {name!r:.80}: a name has 1 to {MAX_NAME} printable characters")
    return [(name, _finite(value, f"{what} {name}")) for name, value in values.items()]


def number_of(value: Any, what: str) -> float:
    """A score or a part of it, also from numpy; True is 1. Raises TypeError for a text, a tensor or None: what they are
    worth would be a guess."""
    if type(value).__module__ == "numpy":
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{what} is {value!r:.60}, not a number: give float(...)")
    return float(value)


def _finite(value: Any, what: str) -> float:
    number = number_of(value, what)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number

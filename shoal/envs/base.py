"""The environment protocol: what a task is, how an episode continues, and what it scores.

Implemented by the built-in environments and by files that users write. Called by `conversation`, `check` and
`evaluate`. It does not deal with tokens, the model or the network.

An environment is deterministic: it has no clock, no global random state, and no memory between episodes. The same task
and the same actions must give everyone the same replies and the same score; otherwise nobody can replay the rollout.
"""

import inspect
import random
import re
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from shoal.envs.exceptions import LOCAL_ERRORS
from shoal.envs.score import Scored
from shoal.errors import MessagesRefused, ShoalError, Undecided

Task: TypeAlias = Any
"""One problem, as plain data whose meaning only its environment knows."""

State: TypeAlias = Any
"""The state of an episode, as plain data that only its environment reads. It should be immutable."""

Message: TypeAlias = Mapping[str, Any]
"""A chat message as in OpenAI's API: `role`, `content`, and for tools `tool_calls`, `tool_call_id` and `name`."""

Player: TypeAlias = Callable[[State, random.Random], str]
"""A scripted player: it takes the state and a private random generator, and returns the next action."""


class Step(NamedTuple):
    """The result of an action."""

    state: State
    reply: str | Message | Sequence[Message] | None
    """What the environment says next: the user's text, or messages, such as the results of several tools. None or ignored
    if the episode is done. A seat that acts for the first time has seen nothing: for it, this is the whole opening."""
    done: bool
    reward: float = 0.0
    """What this turn earns. It is added to the episode's score. A run may credit it to the turn: see `credit`."""
    learn: bool = True
    """Whether the policy learns from the turn that it has just written. If not, the turn is still checked and paid."""
    seat: int = 0
    """The seat that acts next, from 0 to `num_seats` - 1. The policy plays every seat, and each sees only its own view."""
    restart: bool = False
    """Whether `reply` replaces the conversation that the next seat has seen, for example with a shorter one. In it, a
    `Written` of `shoal.policy.messages` is a turn of the policy, counted from 0 over the episode."""
    steps: Sequence[tuple[int, float]] = ()
    """Steps within the turn: for each, how many of the action's characters end with it, rising, and what it earns. That is
    added to the episode's score, like `reward`, which is for what follows the last of them."""


class Env(Protocol):
    """An environment. A class that inherits from this one gets the defaults below."""

    name: str
    num_tasks: int
    """Training tasks, with index 0 to num_tasks - 1."""
    num_heldout: int = 0
    """Tasks for evaluation that are never trained on; 0 if the environment has none."""
    reward_bounds: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score."""

    @abstractmethod
    def task(self, index: int, heldout: bool = False) -> Task:
        """The task with this index. Raises IndexError if the index is out of range (see `require_index`)."""
        ...

    @abstractmethod
    def reset(self, task: Task) -> tuple[State, list[Message]]:
        """A fresh state, and the messages that open the conversation. The last one is not the assistant's."""
        ...

    @abstractmethod
    def step(self, state: State, action: str) -> Step:
        """Answer an action. The policy may write any text: empty, long or nonsense.

        In a conversation the text is an `Action`, which also gives reasoning, visible text and tool calls.
        """
        ...

    @abstractmethod
    def score(self, state: State) -> Scored:
        """The episode's reward so far, within `reward_bounds`: a number, or a `Score` in parts.

        Also called when a token limit cuts the episode short, unless the environment has a `truncated_score`.
        """
        ...


class Scripted(Protocol):
    """An environment with scripted players. Checks and supervised cold starts need them."""

    def players(self) -> Mapping[str, Player]:
        """At least "right", which nearly always succeeds, and "wrong", which never succeeds."""
        ...


class Solved(Protocol):
    """An environment that knows an answer to each task. `shoal env check` then tries them all."""

    def solution(self, task: Task) -> str | Sequence[str]:
        """What earns the highest reward: the only turn, or all turns."""
        ...


class Tooled(Protocol):
    """An environment whose policy may call tools. It answers a call with a message of role tool."""

    tools: Sequence[Mapping[str, Any]]
    """Functions as JSON schemas in OpenAI's form. The chat template shows them to the policy."""


class Seated(Protocol):
    """A game in which the policy plays several seats. Seat 0 acts first: `reset` opens its view."""

    num_seats: int


class Truncated(Protocol):
    """An environment that scores an episode differently if a token limit cut it short."""

    def truncated_score(self, state: State) -> Scored:
        """Called in place of `score`."""
        ...


class Comparing(Protocol):
    """An environment that compares an answer with its siblings: the other rollouts of its group."""

    def group_scores(self, states: Sequence[State]) -> Sequence[Scored]:
        """What each rollout earns in addition to its own score, given the last state of each. Failed rollouts are left
        out."""
        ...


class Decided(Protocol):
    """An environment that says whether an episode is won. Evaluation then counts the wins."""

    def success(self, state: State) -> bool:
        """Whether the episode, in this state, is a success."""
        ...


class Raised(Exception):
    """What an environment raised in another process, as one line that says where."""


class NoText(ShoalError):
    """A scripted player returned something else than a text."""


_SAID = (Raised, MessagesRefused, Undecided, NoText)
"""Their texts say all: the place in the code says no more."""


def step_of(told: object) -> Step:
    """What an environment's `step` returned. Raises `TypeError` if it is no `Step`, or a tuple like one."""
    if not isinstance(told, tuple | list):
        raise TypeError(f"step() must return Step(state, reply, done), not {type(told).__name__}")
    if not 3 <= len(told) <= len(Step._fields):
        raise TypeError(f"step() must return Step(state, reply, done), not {len(told)} values")
    return Step(*told)


class Targeted(NamedTuple):
    """A task whose prompt asks for a length, in a run that shapes rewards by it. The environment sees the task alone."""

    task: Task
    tokens: int
    """The length that the prompt asks for."""


HERE = Path(__file__).parent


def require_index(index: int, count: int) -> None:
    """Raise IndexError unless 0 <= index < count. With Python's negative indices, two indices could name one task."""
    if not 0 <= index < count:
        raise IndexError(f"task {index}: the index must be between 0 and {count - 1}")


def task_of(env: Env, index: int, heldout: bool = False) -> Task:
    """The task with this index. Raises as `wrap_env_errors`."""
    kind = "held-out task" if heldout else "task"
    with wrap_env_errors(env, f"environment {label_of(env)} cannot make {kind} {index}", "Fix it, or num_tasks"):
        return env.task(index, heldout=True) if heldout else env.task(index)


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
    play = getattr(env, "players", None)
    return {} if play is None else {name: partial(_text_of, name, player) for name, player in play().items()}


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
    solve = getattr(env, "solution", None)
    found = None if solve is None else solve(task.task if isinstance(task, Targeted) else task)
    return (found,) if isinstance(found, str) else None if found is None else tuple(found)


def is_decided(env: Env) -> bool:
    """Whether an environment, or the one under settings, says which episodes are won: whether it is `Decided`. From Python
    3.12 on, `isinstance` of a protocol does not see what `__getattr__` passes on."""
    return getattr(env, "success", None) is not None


def success_of(env: Env, state: State) -> bool | None:
    """Whether the episode is a success, or None if the environment does not say."""
    decide = getattr(env, "success", None)
    return None if decide is None else bool(decide(state))


def source_of(env: Env) -> Path | None:
    """The Python file that defines the environment's class, or that it names as `source`, if it is known."""
    env = getattr(env, "env", env)  # under settings
    if isinstance(named := getattr(env, "source", None), Path):
        return named
    file = getattr(sys.modules.get(type(env).__module__), "__file__", None)
    return Path(file) if file else None


def label_of(env: Any) -> str:
    """What a run calls an environment: two of one class have the same name, and other labels."""
    return str(getattr(env, "run_label", "") or env.name)


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
    is_ours = bool(frames) and HERE in Path(frames[-1].filename).parents
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

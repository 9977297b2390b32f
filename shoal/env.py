"""What an environment is: all that its file or package imports of shoal, beside the graders in `shoal.graders`.

An environment makes tasks, opens and continues conversations about them, and scores each episode. Write a class with the
four methods of `Env`, and name it in the file's last line; a function there makes it from the run file's `args`:

    from shoal.env import Env, Step, require_index

    class Backwards(Env):
        name, num_tasks, num_heldout = "backwards", 3, 1

        def task(self, index, heldout=False):
            require_index(index, self.num_heldout if heldout else self.num_tasks)
            return "melon" if heldout else ("apple", "cherry", "lemon")[index]

        def reset(self, task):
            return (task, ""), [{"role": "user", "content": f"Write {task} backwards."}]

        def step(self, state, action):
            return Step((state[0], action.strip()), None, True)

        def score(self, state):
            return float(state[1] == state[0][::-1])

    environment = Backwards

An environment is deterministic: it has no clock, no global random state, and no memory between episodes. The same task
and the same actions must give everyone the same replies and the same score; otherwise nobody can replay the rollout.

The protocols `Scripted`, `Solved`, `Tooled`, `Seated`, `Truncated`, `GroupScoring` and `HasSuccess` are what an environment
may offer beside that: it has the member, and inherits from none of them. Other members that it may have:

- `weights`: the weight of each part of its scores, by name; 1 where there is none;
- `reproducible = False`: the same actions may get other replies, as with a judge; then only the run's host plays it;
- `template`: arguments of the chat template, such as `{"enable_thinking": False}`;
- `parser`: the notation of tool calls, if it should not be that of the chat template;
- `history = "template"`: of its earlier turns, the policy reads what the chat template shows, and not all tokens;
- `max_turn_tokens`, `max_tokens`: limits on a turn and on a row of tokens, below those of the run;
- `answer_in_prompt = True`: the answer is in the prompt, so `shoal env check` calls it no leak.

`LATER` lists what other rooms offer: tasks from a data set, environments of other libraries, and sandboxes for programs.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from shoal.chat.messages import Written as Written
    from shoal.chat.tool_calls import parse as parse
    from shoal.envs.adapters.reasoning_gym import ReasoningGym as ReasoningGym
    from shoal.envs.adapters.textarena import TextArena as TextArena
    from shoal.envs.adapters.verifiers_v0 import VerifiersV0 as VerifiersV0
    from shoal.envs.adapters.verifiers_v1 import VerifiersV1 as VerifiersV1
    from shoal.envs.dataset import DatasetEnv as DatasetEnv
    from shoal.envs.dataset import read_rows as read_rows
    from shoal.protocol.encoding import domain_hash as domain_hash
    from shoal.sandbox.limits import Ended as Ended
    from shoal.sandbox.limits import Limits as Limits
    from shoal.sandbox.limits import Stopped as Stopped
    from shoal.sandbox.pool import Pool as Pool

Task: TypeAlias = Any
"""One problem, as plain data whose meaning only its environment knows."""

State: TypeAlias = Any
"""The state of an episode, as plain data that only its environment reads. It should be immutable."""

Message: TypeAlias = Mapping[str, Any]
"""A chat message as in OpenAI's API: `role`, `content`, and for tools `tool_calls`, `tool_call_id` and `name`."""

Player: TypeAlias = Callable[[State, Random], str]
"""A scripted player: it takes the state and a private random generator, and returns the next action."""


class Score(NamedTuple):
    """An episode's score in parts. Partial credit is a part between 0 and 1."""

    parts: Mapping[str, float]
    """Their sum, each times its weight, is the reward. The run file's weights go before the environment's `weights`; the
    default is 1."""
    metrics: Mapping[str, float] = {}
    """Reported, but not rewarded."""


Scored: TypeAlias = float | Score
"""What `score`, `truncated_score` and `group_scores` give."""


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
    `Written` is a turn of the policy, counted from 0 over the episode."""
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


class ToolCall(NamedTuple):
    """A tool and its arguments."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """As the policy wrote it; empty in notations without ids."""


class Parsed(NamedTuple):
    """The parts of a turn."""

    reasoning: str
    visible: str
    """What is said, without reasoning, tool calls and surrounding white space."""
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...]
    """What is malformed, one line each."""
    begins: int
    """Where in the text reasoning ends and the rest begins."""


class Action(str):
    """The turn's text, without its end token."""

    _notation: str
    _thinking: bool
    _tools: Sequence[Mapping[str, Any]]
    _parsed: Parsed | None

    def __new__(
        cls, text: str, notation: str = "", thinking: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> "Action":
        """`notation` is that of tool calls. `thinking` says whether the prompt had begun the reasoning."""
        action = super().__new__(cls, text)
        action._notation, action._thinking, action._tools, action._parsed = notation, thinking, tools, None
        return action

    @property
    def parsed(self) -> Parsed:
        """All parts."""
        if self._parsed is None:
            from shoal.env import parse

            self._parsed = parse(str(self), self._notation, self._thinking, self._tools)
        return self._parsed

    @property
    def reasoning(self) -> str:
        """What the policy thought before it spoke; empty if nothing."""
        return self.parsed.reasoning

    @property
    def visible(self) -> str:
        """What it said, without reasoning, tool calls and surrounding white space."""
        return self.parsed.visible

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that it called, with their arguments."""
        return self.parsed.calls

    @property
    def problems(self) -> tuple[str, ...]:
        """What is malformed in its tool calls, one line each."""
        return self.parsed.problems


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


class GroupScoring(Protocol):
    """An environment that compares an answer with its siblings: the other rollouts of its group."""

    def group_scores(self, states: Sequence[State]) -> Sequence[Scored]:
        """What each rollout earns in addition to its own score, given the last state of each. Failed rollouts are left
        out."""
        ...


class HasSuccess(Protocol):
    """An environment that says whether an episode is won. Evaluation then counts the wins."""

    def success(self, state: State) -> bool:
        """Whether the episode, in this state, is a success."""
        ...


def require_index(index: int, count: int) -> None:
    """Raise IndexError unless 0 <= index < count. With Python's negative indices, two indices could name one task."""
    if not 0 <= index < count:
        raise IndexError(f"task {index}: the index must be between 0 and {count - 1}")


LATER = {
    "ReasoningGym": "shoal.envs.adapters.reasoning_gym",
    "TextArena": "shoal.envs.adapters.textarena",
    "VerifiersV0": "shoal.envs.adapters.verifiers_v0",
    "VerifiersV1": "shoal.envs.adapters.verifiers_v1",
    "DatasetEnv": "shoal.envs.dataset",
    "read_rows": "shoal.envs.dataset",
    "parse": "shoal.chat.tool_calls",
    "Written": "shoal.chat.messages",
    "domain_hash": "shoal.protocol.encoding",
    "Ended": "shoal.sandbox.limits",
    "Limits": "shoal.sandbox.limits",
    "Stopped": "shoal.sandbox.limits",
    "Pool": "shoal.sandbox.pool",
}
"""What lies higher on the import map, by name: the module that has it is imported when it is first asked for."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(LATER[name]), name)

"""The rules of an episode, without tokens: what a step may be, what turns and marked steps earn, and how the end is scored.

Code that plays an episode is a generator: it yields an `EnvCall`, and gets what the call returned or raised.
"""

import operator
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

from shoal.env import Env, Scored, State, Step
from shoal.envs.interface import Earned, describe, earned, finite_rewards, number_of, step_of
from shoal.protocol.constants import MAX_ROLLOUT_STEPS

T = TypeVar("T")

Mark: TypeAlias = tuple[int, float]
"""Characters of an action up to the end of a step, and what the step earns."""


class EnvCall(NamedTuple):
    """A call of a method of an environment."""

    env: Any
    name: str
    args: tuple[Any, ...]


Calling: TypeAlias = Generator[EnvCall, Any, T]
"""Something that calls environments on its way to a result."""


class EpisodeEnd(NamedTuple):
    """What an episode earned."""

    earned: Earned
    success: bool | None
    """None if the environment does not say."""
    scored: tuple[Scored, ...]
    """What its `score` gave, and what the run adds to that."""


class Episode:
    """One episode of an environment."""

    def __init__(self, env: Env) -> None:
        self.env, self.facts = env, describe(env)
        self.state: State
        self.credit: list[tuple[float, tuple[Mark, ...]]] = []
        """Of each answered turn: what it earns, as the environment says it, and the steps that it marks in the turn."""
        self.call = "step"
        """The method whose answer is judged now, for a fault in it."""

    @property
    def turn_rewards(self) -> list[float]:
        """What turns earn, and steps within them."""
        return [amount for reward, marks in self.credit for amount in (reward, *(paid for _, paid in marks))]

    def answer(self, told: object, action: str) -> Step:
        """Go on with what `step` returned for an action. Raises `TypeError` or `ValueError` if that breaks a rule."""
        step = step_of(told)
        self.state = step.state
        if step.seat not in range(self.facts.num_seats):  # guard: known-seat
            raise ValueError(
                f"step() gives the next turn to seat {step.seat!r:.20}: num_seats is {self.facts.num_seats}"
            )
        self.credit.append((step.reward, marks_of(step.steps, action)))
        return step

    def end(self, cut: bool, added: Callable[[], Sequence[Scored]] = tuple) -> Calling[EpisodeEnd]:
        """Score the episode, which a token limit may have `cut` short. `added` gives what the run adds to the score. Raises
        what the environment raises, and `TypeError` or `ValueError` for what is no reward."""
        rewards, self.call = finite_rewards(self.turn_rewards), "score"
        if cut and "truncated_score" in self.facts.members:
            self.call = "truncated_score"
        score = yield EnvCall(self.env, self.call, (self.state,))
        scored = (score, *added())
        found, self.call = earned(self.env, scored, rewards), "success"
        success = None
        if "success" in self.facts.members:
            success = bool((yield EnvCall(self.env, "success", (self.state,))))
        return EpisodeEnd(found, success, scored)


def marks_of(steps: Any, action: str) -> tuple[Mark, ...]:
    """The steps that an environment marks in an action. Raises `ValueError` if they do not end one after another in it."""
    if not steps:
        return ()
    listed = tuple(islice(steps, MAX_ROLLOUT_STEPS + 1))  # a generator need not end
    if len(listed) > MAX_ROLLOUT_STEPS:  # guard: few-marks
        raise ValueError(f"more than {MAX_ROLLOUT_STEPS} steps in a turn")
    marks = tuple((operator.index(end), number_of(reward, "the reward of a step")) for end, reward in listed)
    before = 0
    for end, _ in marks:
        if not before < end <= len(action):  # guard: marks-rise-within-the-action
            raise ValueError(f"a step ends at character {end}, after {before}, in an action of {len(action)}")
        before = end
    return marks

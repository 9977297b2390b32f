"""What the turns and steps of an episode earn, by the tokens at which they end.

An environment marks steps by the characters of an action, since it sees no tokens; the tokens follow from the tokenizer, so
all who replay a rollout find the same.
"""

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from shoal.envs.interface import number_of
from shoal.protocol.algorithm_config import StepCredit, Turns
from shoal.protocol.audit_selection import MAX_REWARD
from shoal.protocol.constants import MAX_ROLLOUT_STEPS
from shoal.protocol.group_rewards import divided
from shoal.protocol.messages import StepReward, StepRewards

Mark: TypeAlias = tuple[int, float]
"""Characters of an action up to the end of a step, and what the step earns."""


class CreditedTurn(NamedTuple):
    """A turn of the policy, and what the environment says that it earns."""

    begin: int
    """Index in the rollout of its first token."""
    token_ids: tuple[int, ...]
    text: str
    reward: float
    marks: tuple[Mark, ...]


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


def step_rewards(
    played: Sequence[CreditedTurn],
    reward: float,
    failed: bool,
    credit: StepCredit,
    decode: Callable[[Sequence[int]], str],
) -> StepRewards:
    """The steps of an episode with this reward. What turns do not earn by themselves, such as the score at the end, is
    earned by the last step. In an episode that `failed`, nothing else was earned."""
    found: list[StepReward] = []
    for turn in map(_unearned, played) if failed else played:  # guard: failed-steps-earn-nothing
        last = turn.begin + len(turn.token_ids) - 1
        if isinstance(credit, Turns):
            found.append(StepReward(last, _sum([turn.reward, *(reward for _, reward in turn.marks)])))
        else:
            found += _steps_of(turn, last, decode)
    return divided(found, reward, credit.most)


def _unearned(turn: CreditedTurn) -> CreditedTurn:
    return turn._replace(reward=0.0, marks=tuple((end, 0.0) for end, _ in turn.marks))


def _sum(rewards: Sequence[float]) -> float:
    """What is too large for a verdict stays so, and yet can be added up."""
    most = 2 * MAX_REWARD
    return math.fsum(min(max(reward, -most), most) for reward in rewards)  # guard: step-sums-are-finite


def _steps_of(turn: CreditedTurn, last: int, decode: Callable[[Sequence[int]], str]) -> list[StepReward]:
    """The marked steps of a turn, then what follows them. A step that ends with the text has the stop token, too, and steps
    that end within one token are one."""
    earned: dict[int, list[float]] = {}
    for end, reward in turn.marks:
        at = last if end == len(turn.text) else turn.begin + _tokens_up_to(end, turn.token_ids, decode) - 1
        earned.setdefault(at, []).append(reward)
    earned.setdefault(last, []).append(turn.reward)
    return [StepReward(at, _sum(rewards)) for at, rewards in earned.items()]


def _tokens_up_to(characters: int, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """How many tokens the first characters of their text take; a token on the border counts."""
    return bisect_left(range(len(token_ids)), characters, key=lambda count: len(decode(token_ids[:count])))

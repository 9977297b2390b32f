"""Rewards of turns and steps: how they divide a rollout's reward, which verdicts may say so, and whose each token is.

Pure. It knows neither environments, which say what a turn or step earns, nor the formulas of `algos`, which make advantages
of it.

The rewards of a rollout's steps add up to its reward by one rule: the last step earns what the others left, which
`left_over` computes with a single rounding. So all who follow the rule find the same bits.

Axes: G rollouts of a group, S steps of a rollout, P tokens of it that the policy learns from.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.messages import POLICY, Rollout, StepReward, StepRewards


def left_over(reward: float, earlier: Sequence[StepReward]) -> float:
    """What the last step earns, given the rollout's reward and the steps before it."""
    return math.fsum([reward, *(-step.reward for step in earlier)])


def divided(steps: Sequence[StepReward], reward: float, most: int) -> StepRewards:
    """The steps of a rollout with this reward, at most so many. The last one takes in all beyond that, and what is left."""
    if not steps:
        return ()
    earlier = tuple(steps[: min(len(steps), most) - 1])
    return (*earlier, StepReward(steps[-1].end, left_over(reward, earlier)))


def fault_of(steps_G: Sequence[StepRewards], rewards_G: Sequence[float], most: int, tokens: int, largest: float) -> str:
    """What no honest validator says of the steps of a group, as the end of a sentence; empty if nothing. A rollout has 1 to
    `most` steps and at most so many tokens, and a step's reward is at most `largest` in size."""
    if len(steps_G) != len(rewards_G):  # guard: steps-of-each-rollout
        return f"has steps of {len(steps_G)} rollouts for {len(rewards_G)} rewards"
    for index, (steps, reward) in enumerate(zip(steps_G, rewards_G, strict=True)):
        ends = [step.end for step in steps]
        if not steps:  # guard: steps-of-every-rollout
            return f"has no steps of rollout {index}, and the policy wrote at least one turn"
        if len(steps) > most:  # guard: steps-within-most
            return f"has {len(steps)} steps of rollout {index}, limit {most}"
        if len({*ends}) < len(ends) or not all(0 <= end < tokens for end in ends):  # guard: steps-end-in-the-rollout
            return f"has steps of rollout {index} that end outside of it, or at one token"
        if not all(abs(step.reward) <= largest for step in steps):  # guard: step-reward-size
            return f"gives a step of rollout {index} a reward above {largest:g} in size"
        if steps[-1].reward != left_over(reward, steps[:-1]):  # guard: steps-add-up
            return f"has steps of rollout {index} that do not add up to its reward"
    return ""


def step_of_tokens(rollout: Rollout, steps: StepRewards) -> NDArray[np.int64]:
    """Index of the step that each learned token belongs to, int64[P]: the first of its row that ends at the token or later,
    or else the last step of the rollout. Raises `ValueError` if there are tokens and no steps."""
    learned_P = np.flatnonzero(rollout.author_T() == POLICY)
    if not steps:
        if len(learned_P):
            raise ValueError("there are no steps, and the policy wrote something")
        return learned_P
    ends_S = np.array([step.end for step in steps])
    order_S = np.argsort(ends_S)
    place_P = np.searchsorted(ends_S[order_S], learned_P)
    found_P = order_S[np.minimum(place_P, len(steps) - 1)]
    row_S, row_P = (np.searchsorted(rollout.starts, at, side="right") for at in (ends_S, learned_P))
    within_P = (place_P < len(steps)) & (row_S[found_P] == row_P)
    return np.where(within_P, found_P, len(steps) - 1)


def of_each(steps_G: Sequence[StepRewards]) -> list[list[float]]:
    """The rewards alone."""
    return [[step.reward for step in steps] for steps in steps_G]


def largest_credits(steps_G: Sequence[StepRewards]) -> list[float]:
    """How much any step of each rollout may be worth, at most, in size: with returns to go or with process rewards.

    For audits, which must not depend on the algorithm. For rollouts of one step it is |reward - group mean|.
    """
    tails_G = [_tails(rewards_S) for rewards_S in of_each(steps_G)]
    longest = max(map(len, tails_G), default=0)
    mean_S = [math.fsum(tails[s] for tails in tails_G if s < len(tails)) / len(tails_G) for s in range(longest)]
    rewards = [step.reward for steps in steps_G for step in steps]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return [
        max(
            (max(abs(tail - mean_S[s]), abs(tail - (len(tails) - s) * mean)) for s, tail in enumerate(tails)),
            default=0.0,
        )
        for tails in tails_G
    ]


def _tails(rewards_S: Sequence[float]) -> list[float]:
    """The sum of each reward and all after it, from the last on: the time grows with the number of steps alone."""
    return list(accumulate(reversed(rewards_S)))[::-1]

"""What of a group's rewards counts: rollouts on which the environment failed, and rewards of turns and steps.

Axes: G rollouts of a group, S steps of a rollout, P tokens of it that the policy learns from.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from shoal.protocol.messages import POLICY, Faults, GroupVerdict, Rollout, StepReward, StepRewards, fact

# --- faults of environments ---


T = TypeVar("T")

MIN_LEFT = 2
"""Rollouts that a group needs to be learned from, and at least half of those that it has."""

MAX_FAULT_CHARS = 200
"""Length of what a verdict says of an error: people read it in terminals."""

REPLY_REFUSED = "the policy's chat template or tokenizer does not take its reply"
"""How the error begins of an environment whose reply the policy cannot be shown."""


def without_faults(values_G: Sequence[T], faults: Sequence[int]) -> Sequence[T]:
    """Of the values of a group's rollouts, those that count."""
    return [value for index, value in enumerate(values_G) if index not in faults] if faults else values_G


def has_enough_rollouts(num: int, faults: Sequence[int]) -> bool:
    """Whether a group of so many rollouts has enough that count. Else the few left would decide what all of it teaches."""
    left = num - len(faults)
    return not faults or (left >= MIN_LEFT and 2 * left >= num)  # guard: few-left-teach-nothing


def fault_indices(faults: Faults | UnsetType) -> tuple[int, ...]:
    """Indices of the rollouts that do not count."""
    return faults.rollouts if faults is not UNSET else ()


def fault_key(group: GroupVerdict) -> tuple[object, ...]:
    """What a verdict says of the faults of a group, without the words of the error, which depend on the machine."""
    return (group.faults.rollouts, group.faults.outside, group.faults.score) if group.faults is not UNSET else ()


class FaultReport(Protocol):
    """A replayed rollout, as far as its environment may fail on it."""

    @property
    def fault(self) -> str:
        """What the environment raised, if the rollout counts in nothing because of it; else empty."""
        ...

    @property
    def outside(self) -> float | None:
        """Its score, if that is outside the environment's bounds."""
        ...


def faults_of(replays: Sequence[FaultReport]) -> Faults | UnsetType:
    """What a verdict says of the faults of a group; unset if there are none."""
    failed = tuple(index for index, one in enumerate(replays) if one.fault)
    outside = tuple(index for index, one in enumerate(replays) if one.outside is not None)
    if not failed and not outside:
        return UNSET
    said = next((replays[index].fault for index in failed), "")
    score = next((float(one.outside) for one in replays if one.outside is not None), 0.0)
    return Faults(failed, outside, score, fact(said, MAX_FAULT_CHARS))


def malformed_faults(faults: Faults, num: int) -> str:
    """What no honest validator says of the faults of a group with so many rollouts, as the end of a sentence; empty if
    nothing."""
    for indices in (faults.rollouts, faults.outside):
        rising = all(before < after for before, after in pairwise(indices))
        if not rising or not all(0 <= index < num for index in indices):  # guard: faults-of-its-rollouts
            return f"has faults of other rollouts than its {num}, or not in their order"
    if not (faults.rollouts or faults.outside):  # guard: faults-only-if-some
        return "has faults of no rollout"
    if not math.isfinite(faults.score):  # guard: outside-score-is-a-number
        return "has a score that is not a finite number"
    if len(faults.said) > MAX_FAULT_CHARS or not faults.said.isprintable():  # guard: faults-print
        return f"has an error that is not one line of at most {MAX_FAULT_CHARS} characters"
    return ""


# --- rewards of turns and steps ---


def left_over(reward: float, earlier: Sequence[StepReward]) -> float:
    """What the last step earns, given the rollout's reward and the steps before it."""
    return math.fsum([reward, *(-step.reward for step in earlier)])


def divided(steps: Sequence[StepReward], reward: float, most: int) -> StepRewards:
    """The steps of a rollout with this reward, at most so many. The last one takes in all beyond that, and what is left."""
    if not steps:
        return ()
    earlier = tuple(steps[: min(len(steps), most) - 1])
    return (*earlier, StepReward(steps[-1].end, left_over(reward, earlier)))


def malformed_steps(
    steps_G: Sequence[StepRewards], rewards_G: Sequence[float], most: int, tokens: int, largest: float
) -> str:
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
    # of each step the sum of its reward and all after it, added from the last on: the time grows with the steps alone
    tails_G = [list(accumulate(reversed(rewards_S)))[::-1] for rewards_S in of_each(steps_G)]
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

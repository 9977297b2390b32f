"""What an episode earns: named parts, whose weighted sum is the reward, and metrics beside them.

Called by `conversation` for each episode and by `replay` for the rollouts of a group. An environment's `score` gives a
number or a `Score`. Every role uses this file to make it one reward. It does not deal with tokens.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from shoal.envs.exceptions import RewardOutOfBounds

MAX_NAMED = 64
"""Limit on the parts of one score, and on its metrics."""

MAX_NAME = 64
"""Limit on the characters in the name of a part or a metric."""


ROUNDING = 1e-9
"""Of the width of the bounds: a score that is less far outside is taken as the bound, because sums are rounded."""


class Score(NamedTuple):
    """An episode's score in parts. Partial credit is a part between 0 and 1."""

    parts: Mapping[str, float]
    """Their sum, each times its weight, is the reward. The run file's weights go before the environment's `weights`; the
    default is 1."""
    metrics: Mapping[str, float] = {}
    """Reported, but not rewarded."""


Scored: TypeAlias = float | Score
"""What `score`, `truncated_score` and `group_scores` give."""


class Earned(NamedTuple):
    """A reward, and where it comes from."""

    reward: float
    parts: dict[str, float]
    """Not multiplied by their weights. Empty if the environment gives a number."""
    metrics: dict[str, float]


def weights_of(env: object) -> Mapping[str, float]:
    """Weights of the parts by name. A part without an entry has weight 1."""
    weights: Mapping[str, float] = getattr(env, "weights", {})
    return weights


def earned(env: Any, scored: Sequence[Any], turn_rewards: Sequence[float] = ()) -> Earned:
    """The reward: the sum of the scores and of the turns' rewards. Parts of the same name are added.

    Raises `RewardOutOfBounds` if the reward is outside the environment's bounds, and ValueError if it is not finite.
    """
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    terms = finite_rewards(turn_rewards)
    weights = weights_of(env)
    for score in scored:
        if isinstance(score, Score):
            for name, value in _named(score.parts, "part"):
                parts[name] = parts.get(name, 0.0) + value
                terms.append(value * float(weights.get(name, 1.0)))
            metrics.update(_named(score.metrics, "metric"))
        else:
            terms.append(number_of(score, "the score"))
    low, high = env.reward_bounds
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

"""Whether the reward rises: a sentence that answers it in the terminal and on the page alike. Pure."""

import math
from collections.abc import Sequence

TREND_STEPS = 20
"""The newest of so many steps are compared with those before."""

LEAST_STEPS = 4


def trend_of(rewards: Sequence[float]) -> str:
    """How the reward has changed; empty if there are too few steps to say. It is level within two standard errors.

    A stranger's host may report any number: if the means or their noise are not finite, the sentence is empty, too.
    """
    if len(rewards) < LEAST_STEPS:
        return ""
    size = min(TREND_STEPS, len(rewards) // 2)
    (before, spread), (newest, newest_spread) = _moments(rewards[-2 * size : -size]), _moments(rewards[-size:])
    places = ".3f" if max(abs(before), abs(newest)) < 1e6 else ".6g"
    told = format(before, places), format(newest, places)
    change = float(told[1]) - float(told[0])  # as they are shown
    noise = math.sqrt((spread + newest_spread) / size)  # the standard error of the difference
    if not math.isfinite(change + noise):
        return ""
    word = "level" if abs(change) <= 2 * noise else "up" if change > 0 else "down"
    return f"reward {word} in the last {2 * size} steps: {told[0]} to {told[1]}, means of {size} each"


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and sample variance of two rewards or more. They overflow to inf or nan, where `statistics` would raise."""
    mean = sum(rewards) / len(rewards)
    return mean, sum((reward - mean) * (reward - mean) for reward in rewards) / (len(rewards) - 1)

"""Whether the reward rises: a sentence that answers it in the terminal and on the page alike. Pure."""

from collections.abc import Sequence
from statistics import mean, variance

TREND_STEPS = 20
"""The newest of so many steps are compared with those before."""

LEAST_STEPS = 4


def trend_of(rewards: Sequence[float]) -> str:
    """How the reward has changed; empty if there are too few steps to say. It is level within two standard errors."""
    if len(rewards) < LEAST_STEPS:
        return ""
    size = min(TREND_STEPS, len(rewards) // 2)
    parts = rewards[-2 * size : -size], rewards[-size:]
    before, newest = map(mean, parts)
    change = round(newest, 3) - round(before, 3)  # as they are shown
    noise = (sum(map(variance, parts)) / size) ** 0.5  # the standard error of the difference
    word = "level" if abs(change) <= 2 * noise else "up" if change > 0 else "down"
    return f"reward {word}: {before:.3f} to {newest:.3f}, means of {size} steps each"

"""Whether the reward rises: a sentence that answers it in the terminal and on the page alike. Pure."""

from collections.abc import Sequence

TREND_STEPS = 20
"""The newest of so many steps are compared with those before."""

LEAST_STEPS = 4


def trend_of(rewards: Sequence[float]) -> str:
    """How the reward has changed; empty if there are too few steps to say."""
    if len(rewards) < LEAST_STEPS:
        return ""
    size = min(TREND_STEPS, len(rewards) // 2)
    newest, before = (sum(part) / len(part) for part in (rewards[-size:], rewards[-2 * size : -size]))
    change = round(newest, 3) - round(before, 3)  # as they are shown
    word = "up" if change > 0 else "down" if change < 0 else "level"
    return f"reward {word}: {before:.3f} to {newest:.3f}, means of {size} steps each"

"""Reward shaping: target lengths, overlong answers, repetition, and signs of reward hacking."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# --- A reward for answers of about the length that the prompt asks for ---


def length_penalty(length: float, target: float, alpha: float = 0.0003, most: float = math.inf) -> float:
    """-alpha * min(|target - length|, most)."""
    return -alpha * min(abs(target - length), most)


# --- The soft punishment of answers that come near the length limit ---


def overlong(length: float, limit: float, buffer: float) -> float:
    """R, from -1 to 0."""
    if length <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - length) / buffer) if buffer > 0 else -1.0


# --- How much of a text repeats itself ---


def repeated_share(turns: Sequence[Sequence[Hashable]], n: int) -> float:
    """The share, from 0 to 1; 0 if no turn has n items."""
    found = Counter(tuple(turn[i : i + n]) for turn in turns for i in range(len(turn) - n + 1))
    return 1.0 - len(found) / found.total() if found else 0.0


# --- Two signs of reward hacking that are in the rollouts themselves ---


N = 4
"""Shorter n-grams repeat in honest text; longer ones miss short loops."""


def loop_share(y: ArrayLike, n: int = N) -> float:
    """seq-rep-n of tokens; 0 if they have no n-gram."""
    tokens = np.asarray(y)
    if len(tokens) <= n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def rank_correlation(rewards: ArrayLike, lengths: ArrayLike) -> float | None:
    """rho_S; None if all rewards or all lengths are equal."""
    a, b = _ranks(np.asarray(rewards, float)), _ranks(np.asarray(lengths, float))
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return None
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]

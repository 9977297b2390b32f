"""Two signs of reward hacking that are in the rollouts themselves: they repeat themselves, or reward follows their length.

Called by `train/signs`. Pure numpy.

    symbol   meaning
    y        tokens of one rollout
    n        length of an n-gram
    seq-rep  1 - |different n-grams of y| / |n-grams of y|        Welleck et al. 2019, arXiv:1908.04319, eq. 8
    rho_S    Spearman's rank correlation of rewards and lengths within one group, ties with their mean rank
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

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

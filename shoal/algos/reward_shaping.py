"""Reward shaping: target lengths, overlong answers, repetition, and signs of reward hacking."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# --- A reward for answers of about the length that the prompt asks for ---
#
# That of INTELLECT-2 (arXiv:2505.07291).
#
#       symbol     meaning                                                          argument
#       l          length of the answer, tokens                                     length
#       L_target   length that the prompt asked for, tokens                         target
#       alpha      reward lost for each token of difference                         alpha
#       R          reward:  R_task - alpha * |L_target - l|                         the result is the second term
#
# The term is that of L1-Exact (arXiv:2503.04697, equation 1), which writes the target into the prompt; INTELLECT-2 draws
# it from a few discrete lengths, with alpha = 0.0003.
#
# Changed from the paper: the distance may be bounded (`most`), because a run must know the lowest reward that a rollout
# can have. Beyond the bound, a longer answer loses nothing more.


def length_penalty(length: float, target: float, alpha: float = 0.0003, most: float = math.inf) -> float:
    """-alpha * min(|target - length|, most)."""
    return -alpha * min(abs(target - length), most)


# --- The soft punishment of answers that come near the length limit ---
#
# That of DAPO (arXiv:2503.14476, equation 13).
#
#       symbol    meaning                                                argument
#       |y|       length of the answer                                   length
#       L_max     length at which the punishment is whole                limit
#       L_cache   how far below it the punishment begins                 buffer
#       R         0                                  |y| <= L_max - L_cache
#                 (L_max - L_cache - |y|) / L_cache  up to L_max
#                 -1                                 above
#
# Without it, a right answer that is cut off gets the reward of a wrong one, which is noise. Here the last tokens before
# the limit say that they are too many. Changed from the paper: nothing; with a buffer of 0 the step at L_max remains.


def overlong(length: float, limit: float, buffer: float) -> float:
    """R, from -1 to 0."""
    if length <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - length) / buffer) if buffer > 0 else -1.0


# --- How much of a text repeats itself ---
#
# The share of its n-grams that occurred before.
#
#       symbol   meaning                                                        argument
#       n        length of a sequence                                           n
#       m        sequences of that length in all turns, repeats counted         the sum of the counts
#       d        different ones among them                                      the number of counts
#       share    1 - d / m;  0 without repetition, near 1 for a loop            the result
#
# The measure of the repetition penalty of "Demystifying Long Chain-of-Thought Reasoning" (arXiv:2502.03373, section 4.3):
# there, a length reward led policies to fill their answers with repeats.
#
# Changed from the paper: it gives each token of a repeat a penalty of its own, discounted on its own; here the share is
# one number for the rollout, because a rollout has one reward. No sequence reaches over the border of two turns.


def repeated_share(turns: Sequence[Sequence[Hashable]], n: int) -> float:
    """The share, from 0 to 1; 0 if no turn has n items."""
    found = Counter(tuple(turn[i : i + n]) for turn in turns for i in range(len(turn) - n + 1))
    return 1.0 - len(found) / found.total() if found else 0.0


# --- Two signs of reward hacking that are in the rollouts themselves ---
#
# They repeat themselves, or reward follows their length.
#
#       symbol   meaning
#       y        tokens of one rollout
#       n        length of an n-gram
#       seq-rep  1 - |different n-grams of y| / |n-grams of y|        Welleck et al. 2019, arXiv:1908.04319, eq. 8
#       rho_S    Spearman's rank correlation of rewards and lengths within one group, ties with their mean rank


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

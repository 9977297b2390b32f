"""A reward for answers of about the length that the prompt asks for: that of INTELLECT-2 (arXiv:2505.07291).

Called by `envs/shaping` and, through `graders/format`, by environments. Pure: it knows no task, token or text.

    symbol     meaning                                                          argument
    l          length of the answer, tokens                                     length
    L_target   length that the prompt asked for, tokens                         target
    alpha      reward lost for each token of difference                         alpha
    R          reward:  R_task - alpha * |L_target - l|                         the result is the second term

The term is that of L1-Exact (arXiv:2503.04697, equation 1), which writes the target into the prompt; INTELLECT-2 draws it
from a few discrete lengths, with alpha = 0.0003.

Changed from the paper: the distance may be bounded (`most`), because a run must know the lowest reward that a rollout can
have. Beyond the bound, a longer answer loses nothing more.
"""

import math


def length_penalty(length: float, target: float, alpha: float = 0.0003, most: float = math.inf) -> float:
    """-alpha * min(|target - length|, most)."""
    return -alpha * min(abs(target - length), most)

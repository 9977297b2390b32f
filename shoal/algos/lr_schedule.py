"""Learning rate of a step: warm-up, then constant, linear or cosine.

It works on plain numbers and needs no optimiser.

    symbol   meaning
    t        the step, counted from 0
    W        warm-up steps:   lr(t) = peak (t + 1) / W for t < W, so that the first step already moves
    x        progress after warm-up, 0 at step W and 1 at the last:   x = (t - W) / (steps - 1 - W)

    linear   peak (1 - 0.9 x)
    cosine   peak (0.1 + 0.9 (1 + cos(pi x)) / 2)        SGDR, arXiv:1608.03983, eq. 5, down to a tenth
"""

import math
from typing import Literal

FINAL_SHARE = 0.1
"""Linear and cosine schedules end at this share of the peak, because late RL steps still learn something."""


def learning_rate(
    t: int, *, peak: float, shape: Literal["constant", "linear", "cosine"], warmup_steps: int, steps: int
) -> float:
    """lr(t). Steps after the last keep its value, so that a run can be extended."""
    if t < warmup_steps:
        return peak * (t + 1) / warmup_steps
    x = min(1.0, (t - warmup_steps) / max(1, steps - 1 - warmup_steps))
    if shape == "linear":
        return peak * (1 - (1 - FINAL_SHARE) * x)
    if shape == "cosine":
        return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * x)) / 2)
    return peak

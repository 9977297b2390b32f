"""The clipped loss of PPO's critic: squared error that gains nothing from leaving the range around the old value.

Called by `train/critic`, in runs whose credit is a critic's. Pure. The targets come from `gae`.

    symbol   meaning                                                                  argument
    V        the critic's value before token n, to be learned                         V_N
    V_old    its value before the step's first update                                 V_old_N
    R        target of the value                                                      R_N
    eps      range within which a step may move a value; infinite: plain error         eps
    L        1/2 (1 / sum_i |o_i|) sum_n max( (V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2 )

The paper of PPO (arXiv:1707.06347, equation 9) has the plain squared error; the clip is that of the authors' code, which
arXiv:2006.05990 studies and finds that it may harm. So a run may turn it off. The maximum makes the clip one of progress
alone: a value that the step moved away from its target keeps its gradient.

Changed from the code: one half, and the sum is divided by the batch's tokens.

Axes: N policy tokens of a micro-batch.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ValueTerms(NamedTuple):
    """The loss, and what happened to each token."""

    loss: Tensor
    """Scalar: this micro-batch's share of L."""
    clipped_N: Tensor
    """bool: tokens whose gradient the clip removed."""


def value_loss(
    V_N: Tensor, V_old_N: Tensor, R_N: Tensor, weight_N: Tensor, *, eps: float = 0.2, num_tokens: float
) -> ValueTerms:
    """L over the given tokens; `weight_N` multiplies each token's term. `num_tokens` counts those of the whole batch."""
    free_N = (V_N - R_N).square()
    near_N = V_old_N + (V_N - V_old_N).clamp(-eps, eps) if math.isfinite(eps) else V_N
    held_N = (near_N - R_N).square()
    loss = 0.5 * (weight_N * torch.maximum(free_N, held_N)).sum() / num_tokens
    return ValueTerms(loss, ((held_N > free_N) & (near_N != V_N)).detach())

"""GRPO with two-sided clipping: the loss of INTELLECT-2 (arXiv:2505.07291). Its advantages are in `algos/grpo_advantages`.

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol   meaning                                                      argument
    o_i      tokens that the policy wrote in rollout i                    n runs over all of them, i by i
    r        importance ratio pi_theta(o) / mu(o) of one token            exp(logp_N - mu_logp_N)
    mu       the policy that sampled                                      mu_logp_N
    A        advantage of the token                                       A_N
    eps      range of the ratio within which a token still has a gradient  eps
    delta    upper bound of the ratio where A < 0; delta > 1 + eps        delta
    J        objective:  (1 / sum_i |o_i|) sum_n min( min(r, delta) A, clip(r, 1 - eps, 1 + eps) A )

The plain clip of PPO (arXiv:1707.06347, eq. 7) leaves r A unbounded below where A < 0: one token that is likely under
the new policy and unlikely under the old one can dominate the step. `delta` bounds it. Where A > 0, the inner clip is
already tighter.

Changed from the paper: mu is the worker's own log-probability instead of a second pass of the trainer, where it cannot
differ much from the truth unseen (`claims_bend_ratios`); else it is such a pass, under the version that sampled. Either
way the ratio also corrects for staleness, and in a step of several updates for those already made. No KL term.
What a worker that lies about mu could do: mute its tokens, or scale their gradient up to 1 + eps (A > 0) or
delta (A < 0).

Axes: N policy tokens of a micro-batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.algos.ratios import ratio


class GrpoTerms(NamedTuple):
    """The loss and what happened to each token."""

    loss: Tensor
    """Scalar: this micro-batch's share of -J."""
    clipped_N: Tensor
    """bool: tokens whose gradient a bound removed."""


def grpo_loss(
    logp_N: Tensor, mu_logp_N: Tensor, A_N: Tensor, weight_N: Tensor, *, eps: float, delta: float, num_tokens: float
) -> GrpoTerms:
    """-J over the given tokens; `weight_N` multiplies each token's term (1 in the paper).

    `num_tokens` is sum_i |o_i| over the whole batch, not over this micro-batch. Then the losses and gradients of
    micro-batches add up to those of the batch, however it is divided.
    """
    r_N = ratio(logp_N, mu_logp_N)
    free_N = r_N.clamp(max=delta) * A_N
    clipped_N = r_N.clamp(1 - eps, 1 + eps) * A_N
    loss = -(weight_N * torch.minimum(free_N, clipped_N)).sum() / num_tokens
    too_high_N = torch.where(A_N > 0, r_N > 1 + eps, r_N > delta)
    too_low_N = (A_N < 0) & (r_N < 1 - eps)
    return GrpoTerms(loss, ((too_high_N & (A_N != 0)) | too_low_N).detach())

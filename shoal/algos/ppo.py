"""PPO's clipped objective, with a range for each side and a bound where the advantage is negative.

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol     meaning                                                        argument
    r          importance ratio pi_theta(o) / pi_old(o) of one token          exp(logp_N - old_logp_N)
    A          advantage of the token                                         A_N
    eps_low    a token with A < 0 has no gradient while r < 1 - eps_low       eps_low
    eps_high   a token with A > 0 has no gradient while r > 1 + eps_high      eps_high
    delta      upper bound of r where A < 0                                   delta; inf: none
    J_n        min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A )

    eps_low = eps_high              PPO, arXiv:1707.06347, eq. 7
    eps_high = 0.28 > eps_low       DAPO's clip-higher, arXiv:2503.14476, eq. 8: a token of low probability p may rise to
                                    (1 + eps_high) p in a step, so rare tokens can become likely and entropy stays higher
    delta > 1 + eps_high            dual clip, arXiv:1912.09729, eq. 5 (c there), and INTELLECT-2's GRPO, arXiv:2505.07291

Without delta, r A is unbounded below where A < 0: one token that is likely under the new policy and unlikely under the old
one can dominate the step. Where A > 0, the inner clip is already tighter.

Changed from the papers: pi_old may be the policy that sampled, which then corrects for staleness, too, and in a step of
several updates for those already made. Its log-probs are the worker's claims where these cannot differ much from the truth
unseen (`claims_bend_ratios`), else the trainer computes them. A worker that lies about its log-probs could mute its tokens,
or scale their gradient up to 1 + eps_high (A > 0) or delta (A < 0).

Axes: N policy tokens of a micro-batch.
"""

import math

import torch
from torch import Tensor

from shoal.algos.ratios import TokenLoss, ratio


def ppo_loss(
    logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, *, eps_low: float, eps_high: float, delta: float = math.inf
) -> TokenLoss:
    """-J_n of each token."""
    return clipped(ratio(logp_N, old_logp_N), A_N, eps_low=eps_low, eps_high=eps_high, delta=delta)


def clipped(
    r_N: Tensor, A_N: Tensor, *, eps_low: float, eps_high: float, delta: float = math.inf
) -> TokenLoss:  # fmt: skip
    """The same from ratios of any kind."""
    free_N = r_N.clamp(max=delta) * A_N
    within_N = r_N.clamp(1 - eps_low, 1 + eps_high) * A_N
    too_high_N = torch.where(A_N > 0, r_N > 1 + eps_high, r_N > delta)
    too_low_N = (A_N < 0) & (r_N < 1 - eps_low)
    return TokenLoss(-torch.minimum(free_N, within_N), ((too_high_N & (A_N != 0)) | too_low_N).detach())

"""DPPO: the policy gradient without tokens whose probability has already moved far enough (arXiv:2602.04879).

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments. With
`squared_ratio` at 1e-3 and advantages without a deviation, this is the default loss of prime-rl in August 2026.

    symbol   meaning                                                      argument
    mu       the policy that sampled                                      mu_logp_N
    r        importance ratio pi_theta(o) / mu(o) of one token            exp(logp_N - mu_logp_N)
    d        pi_theta(o) - mu(o): of all total variation between the two policies, what "this token or another" shows
    A        advantage of the token                                       A_N
    bound    largest |d| in the direction in which A pushes               bound
    J_n      r A, or 0 if A > 0 and d > bound, or A <= 0 and d < -bound   the binary total variation mask

A bound on the ratio stops rare tokens first: one that goes from 0.001 to 0.002 has r = 2 and moved the policy by 0.001. A
bound on d stops tokens that moved the policy much. Those that move back towards mu keep their gradient.

Changed from the paper: |log r| is cut at 20 nats, so that an absurd mu leaves the gradient finite.

Axes: N policy tokens of a micro-batch.
"""

import torch
from torch import Tensor

from shoal.algos.ratios import TokenLoss, ratio


def dppo_loss(logp_N: Tensor, mu_logp_N: Tensor, A_N: Tensor, *, bound: float) -> TokenLoss:
    """-J_n of each token."""
    d_N = (logp_N.exp() - mu_logp_N.exp()).detach()
    dropped_N = torch.where(A_N > 0, d_N > bound, d_N < -bound)
    kept_A_N = torch.where(dropped_N, 0.0, A_N)
    return TokenLoss(-ratio(logp_N, mu_logp_N) * kept_A_N, dropped_N & (A_N != 0))

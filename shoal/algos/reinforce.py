"""REINFORCE: the plain policy gradient (Williams 1992, Machine Learning 8, eq. 4).

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol   meaning                    argument
    A        advantage of the token     A_N
    J_n      A log pi_theta(o)

There is no ratio, so this is the gradient only for tokens that the policy itself sampled: one update a batch, and weights
(`truncated`, `icepop`) if an older or rounded policy sampled. The sum over a rollout's tokens, averaged over rollouts, is
the gradient of the mean reward. With the advantages of `rloo` this is RLOO (arXiv:2402.14740), with those of `maxrl` MaxRL.

Axes: N policy tokens of a micro-batch.
"""

import torch
from torch import Tensor

from shoal.algos.ratios import TokenLoss


def reinforce_loss(logp_N: Tensor, A_N: Tensor) -> TokenLoss:
    """-J_n of each token. Only its gradient means something."""
    return TokenLoss(-A_N * logp_N, torch.zeros_like(A_N, dtype=torch.bool))

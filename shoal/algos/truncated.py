"""Truncated importance weights: what corrects a loss where the policy that samples is not the one that learns.

Called by `train/objective` for each micro-batch, if the run asks for it. The log-probs of quantised actors are not the
trainer's, even for the same version. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol   meaning                                                              argument
    mu       the policy that sampled, quantised and perhaps of an older version    mu_logp_N
    pi_old   the policy that learns, before the step's first update                old_logp_N
    C        the largest weight                                                    C
    w        min( pi_old(o) / mu(o), C ) of one token                              the result

The gradient of PPO's objective is an expectation under pi_old, and tokens come from mu. Weighting each token's term by
pi_old / mu makes it one (up to the tokens before, as is usual); C bounds the variance, for a little bias towards mu
(truncated importance sampling: Ionides 2008, J. Comput. Graph. Stat. 17(2)). Yao et al. 2025 (Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training) use it between a quantised sampler and its trainer:

    grad J = E_mu[ w * grad min( r A, clip(r, 1 - eps, 1 + eps) A ) ],    r = pi_theta / pi_old

So the clip is around the policy that the step began with, and mismatch does not use up its range. Without weights, r is
pi_theta / mu, and a token whose rounding alone moves it out of the range teaches nothing.

Changed from the paper: pi_old is the policy of the step, not of the version that sampled, as in decoupled PPO
(arXiv:2110.00641); so w also corrects staleness. Of older versions the trainer has only the rounded weights.

`truncated_row_weights` has the ratio of a whole row instead. It corrects for the tokens before, too, and has a far larger
variance.

Axes: N policy tokens of a micro-batch.
"""

import math
from typing import NamedTuple

from torch import Tensor

from shoal.algos.ratios import row_sum


class Truncated(NamedTuple):
    """The weights, and which of them were cut."""

    w_N: Tensor
    cut_N: Tensor
    """bool."""


def truncated_weights(old_logp_N: Tensor, mu_logp_N: Tensor, *, C: float) -> Truncated:
    """w of each token: a constant, through which no gradient flows. Any finite log-probs give finite weights."""
    log_ratio_N = (old_logp_N - mu_logp_N).detach()
    return Truncated(log_ratio_N.clamp(max=math.log(C)).exp(), log_ratio_N > math.log(C))


def truncated_row_weights(old_logp_N: Tensor, mu_logp_N: Tensor, row_N: Tensor, *, C: float) -> Truncated:
    """The same with pi_old / mu of all tokens of the row (`row_N` int64), so all of them have the same weight."""
    log_ratio_N = row_sum((old_logp_N - mu_logp_N).detach(), row_N)
    return Truncated(log_ratio_N.clamp(max=math.log(C)).exp(), log_ratio_N > math.log(C))

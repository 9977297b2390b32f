"""Corrections of off-policy rollouts: truncated importance sampling, IcePop, and masks of whole sequences.

Axes: N policy tokens of a micro-batch.
"""

import math
from typing import NamedTuple

from torch import Tensor

from shoal.algos.losses import exp_of, row_mean, row_sum

# --- Truncated importance weights ---
#
# What corrects a loss where the policy that samples is not the one that learns.
#
# The log-probs of quantised actors are not the trainer's, even for the same version.
#
#       symbol   meaning                                                              argument
#       mu       the policy that sampled, quantised and perhaps of an older version    mu_logp_N
#       pi_old   the policy that learns, before the step's first update                old_logp_N
#       C        the largest weight                                                    C
#       w        min( pi_old(o) / mu(o), C ) of one token                              the result
#
# The gradient of PPO's objective is an expectation under pi_old, and tokens come from mu. Weighting each token's term by
# pi_old / mu makes it one (up to the tokens before, as is usual); C bounds the variance, for a little bias towards mu
# (truncated importance sampling: Ionides 2008, J. Comput. Graph. Stat. 17(2)). Yao et al. 2025 (Your Efficient RL
# Framework Secretly Brings You Off-Policy RL Training) use it between a quantised sampler and its trainer:
#
#       grad J = E_mu[ w * grad min( r A, clip(r, 1 - eps, 1 + eps) A ) ],    r = pi_theta / pi_old
#
# So the clip is around the policy that the step began with, and mismatch does not use up its range. Without weights, r is
# pi_theta / mu, and a token whose rounding alone moves it out of the range teaches nothing.
#
# Changed from the paper: pi_old is the policy of the step, not of the version that sampled, as in decoupled PPO
# (arXiv:2110.00641); so w also corrects staleness. Of older versions the trainer has only the rounded weights.
#
# `truncated_row_weights` has the ratio of a whole row instead. It corrects for the tokens before, too, and has a far
# larger variance.


class TruncatedWeights(NamedTuple):
    """The weights, and which of them were cut."""

    w_N: Tensor
    cut_N: Tensor
    """bool."""


def truncated_weights(old_logp_N: Tensor, mu_logp_N: Tensor, *, C: float) -> TruncatedWeights:
    """w of each token: a constant, through which no gradient flows. Any finite log-probs give finite weights."""
    log_ratio_N = (old_logp_N - mu_logp_N).detach()
    return TruncatedWeights(log_ratio_N.clamp(max=math.log(C)).exp(), log_ratio_N > math.log(C))


def truncated_row_weights(old_logp_N: Tensor, mu_logp_N: Tensor, row_N: Tensor, *, C: float) -> TruncatedWeights:
    """The same with pi_old / mu of all tokens of the row (`row_N` int64), so all of them have the same weight."""
    log_ratio_N = row_sum((old_logp_N - mu_logp_N).detach(), row_N)
    return TruncatedWeights(log_ratio_N.clamp(max=math.log(C)).exp(), log_ratio_N > math.log(C))


# --- IcePop ---
#
# Importance weights within a band, and none outside it (Ring-1T, arXiv:2510.18855, section 3).
#
#       symbol   meaning                                                               argument
#       mu       the policy that sampled, perhaps quantised or of an older version     mu_logp_N
#       pi_old   the policy that learns, before the step's first update                old_logp_N
#       a, b     smallest and largest weight                                           least, most
#       w        k = pi_old(o) / mu(o) of one token if a <= k <= b, else 0             the result
#
# A token on which sampler and trainer differ by so much says more about their arithmetic than about the answer. The paper
# has 0.5 and 5; INTELLECT-3 (arXiv:2512.16144) takes them, too.


def icepop_weights(old_logp_N: Tensor, mu_logp_N: Tensor, *, least: float, most: float) -> TruncatedWeights:
    """w of each token, and which are 0: constants, through which no gradient flows."""
    k_N = exp_of((old_logp_N - mu_logp_N).detach())
    dropped_N = (k_N < least) | (k_N > most)
    return TruncatedWeights(k_N.masked_fill(dropped_N, 0.0), dropped_N)


# --- Masks of whole rows ---
#
# A row on which sampler and trainer differ too much teaches nothing.
#
# Source: Liu et al. 2025, When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch,
# whose names are sequence and geometric masks.
#
#       symbol      meaning                                                               argument
#       mu          the policy that sampled, perhaps quantised or of an older version     mu_logp_N
#       pi_old      the policy that learns, before the step's first update                old_logp_N
#       k           pi_old(o) / mu(o) of one token
#       K           sequence: the product of k over the row;                              geometric
#                   geometric: its root by the row's number of tokens
#       a, b        smallest and largest K of a row that is kept                          least, most
#       w           1 if a <= K <= b, else 0: the same for all tokens of a row            the result
#
# The product is the importance weight of the row. It leaves any band with enough tokens, so long rows are dropped first;
# the geometric mean does not depend on length. Neither weights the rows that are kept: `truncated` does that.


def row_mask(
    old_logp_N: Tensor, mu_logp_N: Tensor, row_N: Tensor, *, least: float, most: float, geometric: bool
) -> TruncatedWeights:
    """w of each token, and which are 0. `row_N` int64: the row of each token; all tokens of a row must be there."""
    log_k_N = (old_logp_N - mu_logp_N).detach()
    log_K_N = (row_mean if geometric else row_sum)(log_k_N, row_N)
    dropped_N = log_K_N > math.log(most)
    if least > 0:
        dropped_N = dropped_N | (log_K_N < math.log(least))
    return TruncatedWeights((~dropped_N).to(log_k_N.dtype), dropped_N)

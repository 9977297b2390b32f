"""Corrections of off-policy rollouts: truncated importance sampling, IcePop, and masks of whole sequences."""

import math
from typing import NamedTuple

from torch import Tensor

from shoal.algos.losses import exp_of, row_mean, row_sum

# --- Truncated importance weights ---


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


def icepop_weights(old_logp_N: Tensor, mu_logp_N: Tensor, *, least: float, most: float) -> TruncatedWeights:
    """w of each token, and which are 0: constants, through which no gradient flows."""
    k_N = exp_of((old_logp_N - mu_logp_N).detach())
    dropped_N = (k_N < least) | (k_N > most)
    return TruncatedWeights(k_N.masked_fill(dropped_N, 0.0), dropped_N)


# --- Masks of whole rows ---


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

"""Masks of whole rows: a row on which sampler and trainer differ too much teaches nothing.

Called by `train/objective` for each micro-batch, if the run asks for it. Pure. Source: Liu et al. 2025, When Speed Kills
Stability: Demystifying RL Collapse from the Training-Inference Mismatch, whose names are sequence and geometric masks.

    symbol      meaning                                                               argument
    mu          the policy that sampled, perhaps quantised or of an older version     mu_logp_N
    pi_old      the policy that learns, before the step's first update                old_logp_N
    k           pi_old(o) / mu(o) of one token
    K           sequence: the product of k over the row;                              geometric
                geometric: its root by the row's number of tokens
    a, b        smallest and largest K of a row that is kept                          least, most
    w           1 if a <= K <= b, else 0: the same for all tokens of a row            the result

The product is the importance weight of the row. It leaves any band with enough tokens, so long rows are dropped first; the
geometric mean does not depend on length. Neither weights the rows that are kept: `truncated` does that.

Axes: N policy tokens of a micro-batch.
"""

import math

from torch import Tensor

from shoal.algos.ratios import row_mean, row_sum
from shoal.algos.truncated import Truncated


def row_mask(
    old_logp_N: Tensor, mu_logp_N: Tensor, row_N: Tensor, *, least: float, most: float, geometric: bool
) -> Truncated:
    """w of each token, and which are 0. `row_N` int64: the row of each token; all tokens of a row must be there."""
    log_k_N = (old_logp_N - mu_logp_N).detach()
    log_K_N = (row_mean if geometric else row_sum)(log_k_N, row_N)
    dropped_N = log_K_N > math.log(most)
    if least > 0:
        dropped_N = dropped_N | (log_K_N < math.log(least))
    return Truncated((~dropped_N).to(log_k_N.dtype), dropped_N)

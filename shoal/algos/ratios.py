"""What the policy losses share: the importance ratio, what a loss says of each token, and sums over the tokens of a row.

Called by the loss files beside it. A loss is a formula for one token; which tokens count how much, and what the sum is
divided by, is decided before the step (`averages`). So the losses of micro-batches add up to that of the batch.

Axes: N policy tokens of a micro-batch, row after row; R rows, of which there are at most N.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|log r| is cut here, in nats, before exp. Such tokens are far outside every bound. Without the cut, an absurd mu makes r
infinite, and 0 * inf in the backward pass makes every weight NaN."""


class TokenLoss(NamedTuple):
    """What a loss says of each token."""

    loss_N: Tensor
    """The token's term of -J, before it is weighted and averaged."""
    clipped_N: Tensor
    """bool: tokens whose gradient a bound removed or cut."""


def ratio(logp_N: Tensor, mu_logp_N: Tensor) -> Tensor:
    """r = pi_theta(o) / mu(o) of each token."""
    return exp_of(logp_N - mu_logp_N)


def exp_of(log_ratio_N: Tensor) -> Tensor:
    """Ratios from their logarithms, never infinite."""
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def row_sum(x_N: Tensor, row_N: Tensor) -> Tensor:
    """At each token, the sum of x over its row, [N]. `row_N` int64 counts the rows of the micro-batch from 0."""
    # As long as N, because the number of rows is known on the device alone.
    return torch.zeros_like(x_N).index_add(0, row_N, x_N).index_select(0, row_N)


def row_mean(x_N: Tensor, row_N: Tensor) -> Tensor:
    """At each token, the mean of x over its row, [N]."""
    return row_sum(x_N, row_N) / row_sum(torch.ones_like(x_N), row_N)


def row_rest(x_N: Tensor, row_N: Tensor) -> Tensor:
    """At each token, the sum of x from it to the end of its row, [N], where the tokens of a row follow each other.

    Sums of 2 tokens are added to sums of 4, of 8 and so on. A running sum would be simpler, but torch has none on CUDA that
    gives the same bits each time, and raises if asked for one.
    """
    rest_N, step = x_N, 1
    while step < len(row_N):
        same_row = row_N[:-step] == row_N[step:]
        rest_N = rest_N + F.pad(torch.where(same_row, rest_N[step:], 0.0), (0, step))
        step *= 2
    return rest_N

"""GSPO: the clipped objective with one ratio for a whole row, and GSPO-token (arXiv:2507.18071).

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol    meaning                                                          argument
    y_i       the policy's tokens of row i
    s_i       ( pi_theta(y_i) / pi_old(y_i) )^(1 / |y_i|): the geometric mean of the tokens' ratios
    s_i,t     sg[s_i] pi_theta(y_i,t) / sg[pi_theta(y_i,t)]: as large as s_i, with the gradient of its token alone
    A         advantage; the same for all tokens of a row, unless by_token     A_N
    J_n       min( s A, clip(s, 1 - eps_low, 1 + eps_high) A )                 GSPO: s = s_i, eq. 5; by_token: s_i,t, eq. 13

The reward is of the whole answer, so the ratio is, too: the product of many tokens' ratios has a huge variance, and its
geometric mean a small one. Therefore the range is small: 3e-4 and 4e-4 in the paper. Where A is the same in all tokens of
a row, both forms have the same value and gradient.

The paper takes the mean of J over rows; so average over rollouts. A mean over tokens gives long rows more weight.
Changed from the paper: a rollout of several rows has a ratio for each, because the policy read each anew.

Axes: N policy tokens of a micro-batch.
"""

from torch import Tensor

from shoal.algos.ppo import clipped
from shoal.algos.ratios import TokenLoss, exp_of, row_mean


def gspo_loss(
    logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, row_N: Tensor, *, eps_low: float, eps_high: float, by_token: bool
) -> TokenLoss:
    """-J_n of each token. `row_N` int64: the row of each token, counted from 0; all tokens of a row must be there."""
    log_s_N = row_mean(logp_N - old_logp_N, row_N)
    if by_token:
        log_s_N = log_s_N.detach() + logp_N - logp_N.detach()
    return clipped(exp_of(log_s_N), A_N, eps_low=eps_low, eps_high=eps_high)

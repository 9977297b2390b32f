"""Policy losses: PPO's clip, GRPO, GSPO, CISPO, DPPO, REINFORCE, cross entropy, and the importance ratios that they
share."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# --- What the policy losses share ---


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


# --- PPO's clipped objective, with a range for each side and a bound where the advantage is negative ---


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


# --- GSPO ---


def gspo_loss(
    logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, row_N: Tensor, *, eps_low: float, eps_high: float, by_token: bool
) -> TokenLoss:
    """-J_n of each token. `row_N` int64: the row of each token, counted from 0; all tokens of a row must be there."""
    log_s_N = row_mean(logp_N - old_logp_N, row_N)
    if by_token:
        log_s_N = log_s_N.detach() + logp_N - logp_N.detach()
    return clipped(exp_of(log_s_N), A_N, eps_low=eps_low, eps_high=eps_high)


# --- CISPO ---


def cispo_loss(logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, *, least: float, most: float) -> TokenLoss:
    """-J_n of each token. Its value depends on how likely the tokens are, so only its gradient means something."""
    r_N = ratio(logp_N, old_logp_N).detach()
    return TokenLoss(-r_N.clamp(least, most) * A_N * logp_N, ((r_N < least) | (r_N > most)) & (A_N != 0))


# --- DPPO ---


def dppo_loss(logp_N: Tensor, mu_logp_N: Tensor, A_N: Tensor, *, bound: float) -> TokenLoss:
    """-J_n of each token."""
    d_N = (logp_N.exp() - mu_logp_N.exp()).detach()
    dropped_N = torch.where(A_N > 0, d_N > bound, d_N < -bound)
    kept_A_N = torch.where(dropped_N, 0.0, A_N)
    return TokenLoss(-ratio(logp_N, mu_logp_N) * kept_A_N, dropped_N & (A_N != 0))


# --- REINFORCE ---


def reinforce_loss(logp_N: Tensor, A_N: Tensor) -> TokenLoss:
    """-J_n of each token. Only its gradient means something."""
    return TokenLoss(-A_N * logp_N, torch.zeros_like(A_N, dtype=torch.bool))


# --- Supervised fine-tuning ---


def sft_loss(logp_N: Tensor, weight_N: Tensor, *, num_tokens: float) -> Tensor:
    """L, scalar, nats per token. `num_tokens` counts the policy tokens of the whole batch."""
    return -(weight_N * logp_N).sum() / num_tokens


# --- The clipped loss of PPO's critic ---


class ValueTerms(NamedTuple):
    """The loss, and what happened to each token."""

    loss: Tensor
    """Scalar: this micro-batch's share of L."""
    clipped_N: Tensor
    """bool: tokens whose gradient the clip removed."""


def value_loss(
    V_N: Tensor, V_old_N: Tensor, R_N: Tensor, weight_N: Tensor, *, eps: float = 0.2, num_tokens: float
) -> ValueTerms:
    """L over the given tokens; `weight_N` multiplies each token's term. `num_tokens` counts those of the whole batch."""
    free_N = (V_N - R_N).square()
    near_N = V_old_N + (V_N - V_old_N).clamp(-eps, eps) if math.isfinite(eps) else V_N
    held_N = (near_N - R_N).square()
    loss = 0.5 * (weight_N * torch.maximum(free_N, held_N)).sum() / num_tokens
    return ValueTerms(loss, ((held_N > free_N) & (near_N != V_N)).detach())

"""Policy losses: PPO's clip, GRPO, GSPO, CISPO, DPPO, REINFORCE, cross entropy, the importance ratios that they share, and
the averages over a batch.

Axes: N policy tokens of a micro-batch, row after row; R rows, of which there are at most N.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# --- What the policy losses share ---
#
# The importance ratio, what a loss says of each token, and sums over the tokens of a row.
#
# A loss is a formula for one token; which tokens count how much, and what the sum is divided by, is decided before the
# step (`token_weights`). So the losses of micro-batches add up to that of the batch.


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
#
#       symbol     meaning                                                        argument
#       r          importance ratio pi_theta(o) / pi_old(o) of one token          exp(logp_N - old_logp_N)
#       A          advantage of the token                                         A_N
#       eps_low    a token with A < 0 has no gradient while r < 1 - eps_low       eps_low
#       eps_high   a token with A > 0 has no gradient while r > 1 + eps_high      eps_high
#       delta      upper bound of r where A < 0                                   delta; inf: none
#       J_n        min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A )
#
#       eps_low = eps_high              PPO, arXiv:1707.06347, eq. 7
#       eps_high = 0.28 > eps_low       DAPO's clip-higher, arXiv:2503.14476, eq. 8: a token of low probability p may rise
# to                                       (1 + eps_high) p in a step, so rare tokens can become likely and entropy stays
# higher       delta > 1 + eps_high            dual clip, arXiv:1912.09729, eq. 5 (c there), and INTELLECT-2's GRPO,
# arXiv:2505.07291
# Without delta, r A is unbounded below where A < 0: one token that is likely under the new policy and unlikely under the
# old one can dominate the step. Where A > 0, the inner clip is already tighter.
#
# Changed from the papers: pi_old may be the policy that sampled, which then corrects for staleness, too, and in a step of
# several updates for those already made. Its log-probs are the worker's claims where these cannot differ much from the
# truth unseen (`claims_bend_ratios`), else the trainer computes them. A worker that lies about its log-probs could mute
# its tokens, or scale their gradient up to 1 + eps_high (A > 0) or delta (A < 0).


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
#
# The clipped objective with one ratio for a whole row, and GSPO-token (arXiv:2507.18071).
#
#       symbol    meaning                                                          argument
#       y_i       the policy's tokens of row i
#       s_i       ( pi_theta(y_i) / pi_old(y_i) )^(1 / |y_i|): the geometric mean of the tokens' ratios
#       s_i,t     sg[s_i] pi_theta(y_i,t) / sg[pi_theta(y_i,t)]: as large as s_i, with the gradient of its token alone
#       A         advantage; the same for all tokens of a row, unless by_token     A_N
#       J_n       min( s A, clip(s, 1 - eps_low, 1 + eps_high) A )                 GSPO: s = s_i, eq. 5; by_token: s_i,t,
# eq. 13
# The reward is of the whole answer, so the ratio is, too: the product of many tokens' ratios has a huge variance, and its
# geometric mean a small one. Therefore the range is small: 3e-4 and 4e-4 in the paper. Where A is the same in all tokens
# of a row, both forms have the same value and gradient.
#
# The paper takes the mean of J over rows; so average over rollouts. A mean over tokens gives long rows more weight.
# Changed from the paper: a rollout of several rows has a ratio for each, because the policy read each anew.


def gspo_loss(
    logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, row_N: Tensor, *, eps_low: float, eps_high: float, by_token: bool
) -> TokenLoss:
    """-J_n of each token. `row_N` int64: the row of each token, counted from 0; all tokens of a row must be there."""
    log_s_N = row_mean(logp_N - old_logp_N, row_N)
    if by_token:
        log_s_N = log_s_N.detach() + logp_N - logp_N.detach()
    return clipped(exp_of(log_s_N), A_N, eps_low=eps_low, eps_high=eps_high)


# --- CISPO ---
#
# REINFORCE with a bounded importance weight, which never takes a token's gradient away (arXiv:2506.13585).
#
#       symbol   meaning                                                  argument
#       r        importance ratio pi_theta(o) / pi_old(o) of one token    exp(logp_N - old_logp_N)
#       A        advantage of the token                                   A_N
#       a, b     smallest and largest weight                              least, most
#       J_n      sg[ clip(r, a, b) ] A log pi_theta(o)                    eq. 4 and 5; sg: no gradient flows through it
#
# PPO's clip gives a token outside the range no gradient at all, and these are often the rare words at which a chain of
# thought turns. Here such a token has the gradient of a token at the bound. The paper tunes only b and leaves a out (0).
# ScaleRL (arXiv:2510.13786, section 3.2) has min(r, b) and finds little difference between b = 4, 5 and 8.


def cispo_loss(logp_N: Tensor, old_logp_N: Tensor, A_N: Tensor, *, least: float, most: float) -> TokenLoss:
    """-J_n of each token. Its value depends on how likely the tokens are, so only its gradient means something."""
    r_N = ratio(logp_N, old_logp_N).detach()
    return TokenLoss(-r_N.clamp(least, most) * A_N * logp_N, ((r_N < least) | (r_N > most)) & (A_N != 0))


# --- DPPO ---
#
# The policy gradient without tokens whose probability has already moved far enough (arXiv:2602.04879).
#
# With `squared_ratio` at 1e-3 and advantages without a deviation, this is the default loss of prime-rl in August 2026.
#
#       symbol   meaning                                                      argument
#       mu       the policy that sampled                                      mu_logp_N
#       r        importance ratio pi_theta(o) / mu(o) of one token            exp(logp_N - mu_logp_N)
#       d        pi_theta(o) - mu(o): of all total variation between the two policies, what "this token or another" shows
#       A        advantage of the token                                       A_N
#       bound    largest |d| in the direction in which A pushes               bound
#       J_n      r A, or 0 if A > 0 and d > bound, or A <= 0 and d < -bound   the binary total variation mask
#
# A bound on the ratio stops rare tokens first: one that goes from 0.001 to 0.002 has r = 2 and moved the policy by 0.001.
# A bound on d stops tokens that moved the policy much. Those that move back towards mu keep their gradient.
#
# Changed from the paper: |log r| is cut at 20 nats, so that an absurd mu leaves the gradient finite.


def dppo_loss(logp_N: Tensor, mu_logp_N: Tensor, A_N: Tensor, *, bound: float) -> TokenLoss:
    """-J_n of each token."""
    d_N = (logp_N.exp() - mu_logp_N.exp()).detach()
    dropped_N = torch.where(A_N > 0, d_N > bound, d_N < -bound)
    kept_A_N = torch.where(dropped_N, 0.0, A_N)
    return TokenLoss(-ratio(logp_N, mu_logp_N) * kept_A_N, dropped_N & (A_N != 0))


# --- REINFORCE ---
#
# The plain policy gradient (Williams 1992, Machine Learning 8, eq. 4).
#
#       symbol   meaning                    argument
#       A        advantage of the token     A_N
#       J_n      A log pi_theta(o)
#
# There is no ratio, so this is the gradient only for tokens that the policy itself sampled: one update a batch, and
# weights (`truncated`, `icepop`) if an older or rounded policy sampled. The sum over a rollout's tokens, averaged over
# rollouts, is the gradient of the mean reward. With the advantages of `rloo` this is RLOO (arXiv:2402.14740), with those
# of `maxrl` MaxRL.


def reinforce_loss(logp_N: Tensor, A_N: Tensor) -> TokenLoss:
    """-J_n of each token. Only its gradient means something."""
    return TokenLoss(-A_N * logp_N, torch.zeros_like(A_N, dtype=torch.bool))


# --- Supervised fine-tuning ---
#
# Cross entropy on the tokens that the policy should have written.
#
#       symbol   meaning                                            argument
#       p        the policy's probability of the example's token    exp(logp_N)
#       L        loss:  -(1 / sum_i |o_i|) sum_n w_n log p_n


def sft_loss(logp_N: Tensor, weight_N: Tensor, *, num_tokens: float) -> Tensor:
    """L, scalar, nats per token. `num_tokens` counts the policy tokens of the whole batch."""
    return -(weight_N * logp_N).sum() / num_tokens


# --- The clipped loss of PPO's critic ---
#
# Squared error that gains nothing from leaving the range around the old value.
#
# The targets come from `gae`.
#
#       symbol   meaning                                                                  argument
#       V        the critic's value before token n, to be learned                         V_N
#       V_old    its value before the step's first update                                 V_old_N
#       R        target of the value                                                      R_N
#       eps      range within which a step may move a value; infinite: plain error         eps
#       L        1/2 (1 / sum_i |o_i|) sum_n max( (V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2 )
#
# The paper of PPO (arXiv:1707.06347, equation 9) has the plain squared error; the clip is that of the authors' code,
# which arXiv:2006.05990 studies and finds that it may harm. So a run may turn it off. The maximum makes the clip one of
# progress alone: a value that the step moved away from its target keeps its gradient.
#
# Changed from the code: one half, and the sum is divided by the batch's tokens.


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


# --- How the terms of tokens become one number: the four averages of the field, each as a weight of the row's tokens ---
#
# A loss is sum_n w_n loss_n / N with N policy tokens, whatever the average, so it may be added up in any micro-batches.
#
#     average    mean of                                                weight of a token of rollout i, task q
#     tokens     all tokens of the batch: DAPO, arXiv:2503.14476        1
#     rollouts   rollouts' means: GRPO, arXiv:2402.03300, eq. 3         N / (I |o_i|)
#     prompts    tasks' means over the tokens of all their rollouts:    N / (Q sum of |o_j| over rollouts j of q)
#                ScaleRL, arXiv:2510.13786
#     constant   rollouts' sums divided by L: Dr.GRPO,                  N / (I L)
#                arXiv:2503.20783; L = 1 in its formula
#
# The mean over rollouts pushes a token of a long wrong answer less than one of a short wrong answer, so wrong answers
# grow longer; a constant does not (Dr.GRPO). The mean over tokens gives a task with long answers more weight; that over
# prompts does not.
#
# I and Q count every rollout and task of the batch: also those without a token in the loss, because they were truncated
# and are masked, ended by a fault, or wrote nothing. Such a rollout is a row of 0 tokens: it is in the divisor, and adds
# nothing to the sum. |o_i| and N count tokens of the loss alone, so the mean over tokens does not see it. TRL has these
# denominators if it masks truncated completions: its losses grpo (rollouts) and dr_grpo (constant) divide by all
# rollouts, and bnpo, dapo and cispo (tokens) by the tokens that are not masked. It has no mean over prompts.
#
# Axes: R rows of a batch. I rollouts, Q tasks; a rollout may have several rows.


Average = Literal["tokens", "rollouts", "prompts", "constant"]


def token_weights(
    tokens_R: Sequence[int], rollout_R: Sequence[Hashable], prompt_R: Sequence[Hashable], *, average: Average, L: float
) -> NDArray[np.float64]:
    """w of each token of a row, float64[R]. `tokens_R` counts the tokens of a row in the loss, 0 if it is in the divisor
    alone; the next two name its rollout and its task. `L` counts only for the constant average."""
    num_tokens = sum(tokens_R)
    match average:
        case "tokens":
            return np.ones(len(tokens_R))
        case "constant":
            return np.full(len(tokens_R), num_tokens / (len(set(rollout_R)) * L))
        case "rollouts":
            owner_R = rollout_R
        case "prompts":
            owner_R = prompt_R
    held: dict[Hashable, int] = {}
    for owner, tokens in zip(owner_R, tokens_R, strict=True):
        held[owner] = held.get(owner, 0) + tokens
    return np.array([num_tokens / (len(held) * max(held[owner], 1)) for owner in owner_R])

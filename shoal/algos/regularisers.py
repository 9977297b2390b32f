"""Regularisers of a policy loss: estimates of the KL divergence, squared ratios, and entropy.

Axes: N policy tokens of a micro-batch, V vocabulary.
"""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.algos.losses import LOG_RATIO_LIMIT, row_rest

# --- The KL divergence of the policy from a reference ---
#
# Three estimators, as penalties in the loss or in the advantages.
#
# Source of the estimators: Schulman 2020, Approximating KL Divergence.
#
#       symbol   meaning                                                argument
#       pi       the policy that learns                                 logp_N
#       rho      the reference                                          reference_logp_N
#       x        log rho(o) - log pi(o) of one token
#       k1       -x                  its mean under pi is the KL divergence
#       k2       x^2 / 2             smaller variance, a little bias
#       k3       e^x - 1 - x         no bias, and never negative: GRPO's penalty, arXiv:2402.03300, eq. 4
#
# A good estimate of the divergence need not have its gradient (arXiv:2506.09477). Under pi, with the estimator in the
# loss, the mean gradient of one token is
#
#       k1       0: E[grad log pi] = 0, so this penalty does nothing but add noise
#       k2       the gradient of KL(pi, rho)
#       k3       the gradient of KL(rho, pi), the other way round; near it if pi is near rho
#
# `weighted` multiplies the estimator by the importance ratio, through which gradient flows. Then k1 and k3 have the
# gradient of KL(pi, rho) although another policy sampled, if the ratio is to that policy (k3: DeepSeek-V3.2,
# arXiv:2512.02556). All of these take what was written before a token as given. `rest_of_penalty` is the gradient of the
# divergence between whole rows: each token answers for the penalties of all that follow, as for a reward (RLHF's usual
# form, arXiv:2009.01325; RLOO, arXiv:2402.14740).


Estimator = Literal["k1", "k2", "k3"]


def kl_terms(logp_N: Tensor, reference_logp_N: Tensor, estimator: Estimator) -> Tensor:
    """The estimate at each token, nats. Beyond `LOG_RATIO_LIMIT` it is constant."""
    x_N = (reference_logp_N - logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return -x_N
        case "k2":
            return x_N.square() / 2
        case "k3":
            return x_N.expm1() - x_N


def rest_of_penalty(old_logp_N: Tensor, reference_logp_N: Tensor, row_N: Tensor) -> Tensor:
    """At each token, the sum of k1 from it to the end of its row, without a gradient: what an advantage loses, times beta.

    The tokens are those of the policy before the step (`old_logp_N`).
    """
    return row_rest(kl_terms(old_logp_N, reference_logp_N, "k1").detach(), row_N)


# --- A penalty on the squared log-ratio ---
#
# It pulls the policy back to the one that sampled.
#
#       symbol   meaning                              argument
#       mu       the policy that sampled              mu_logp_N
#       r        pi_theta(o) / mu(o) of one token     exp(logp_N - mu_logp_N)
#       P_n      (log r)^2
#
# The default loss of prime-rl adds 1e-3 P; it names Kimi K2.5 as its source. P is twice the estimator k2 of the KL
# divergence from mu (Schulman 2020), whose gradient on policy is that of the divergence.


def squared_ratio(logp_N: Tensor, mu_logp_N: Tensor) -> Tensor:
    """P_n of each token; beyond `LOG_RATIO_LIMIT` it is constant."""
    return (logp_N - mu_logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).square()


# --- Log-probability and entropy from logits, in one pass over the vocabulary, and the entropy bonus ---
#
# The logits are the largest tensor of a training step (tokens x vocabulary), so the forward pass keeps only one tensor of
# that size, and the backward pass makes only one.
#
#       symbol   meaning
#       z        logits / temperature
#       p        softmax(z)
#       o        the token that was written
#       H        entropy of p, nats:   H = -sum_v p_v log p_v
#       beta     weight of the bonus
#
# Derivatives, which the backward pass uses: d log p_o / d z_v = [v = o] - p_v d H / d z_v = -p_v (log p_v + H)


def logprob_and_entropy(z_NV: Tensor, o_N: Tensor) -> tuple[Tensor, Tensor]:
    """log p_o and H of each token, both [N], differentiable in z. `o_N` int64."""
    logp_N, H_N = _LogprobAndEntropy.apply(z_NV, o_N)
    return logp_N, H_N


def entropy_bonus(H_N: Tensor, weight_N: Tensor, *, beta: float, num_tokens: float) -> Tensor:
    """Loss term -beta * sum_n w_n H_n / num_tokens (arXiv:1602.01783, section 4): lower while the policy is undecided.

    `num_tokens` counts the policy tokens of the whole batch, so that the terms of micro-batches add up.
    """
    return -beta * (weight_N * H_N).sum() / num_tokens


def entropy_of(logp_NV: Tensor) -> Tensor:
    """H of each token, [N]."""
    return -(logp_NV.exp() * logp_NV).sum(-1)


def gradient_of_logits(logp_NV: Tensor, o_N: Tensor, H_N: Tensor, grad_logp_N: Tensor, grad_H_N: Tensor) -> Tensor:
    """The gradient of z, [N, V], from those of log p_o and H."""
    # -p (g_logp + g_H (log p + H)), plus g_logp at the token that was written.
    scale_NV = (logp_NV + H_N[:, None]).mul_(grad_H_N[:, None]).add_(grad_logp_N[:, None])
    grad_NV = scale_NV.mul_(logp_NV.exp()).neg_()
    grad_NV.scatter_add_(-1, o_N[:, None], grad_logp_N[:, None])
    return grad_NV


class _LogprobAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_NV: Tensor, o_N: Tensor) -> tuple[Tensor, Tensor]:
        logp_NV = torch.log_softmax(z_NV, dim=-1)
        H_N = entropy_of(logp_NV)
        ctx.save_for_backward(logp_NV, o_N, H_N)
        return logp_NV.gather(-1, o_N[:, None]).squeeze(-1), H_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logp_NV, o_N, H_N = ctx.saved_tensors
        return gradient_of_logits(logp_NV, o_N, H_N, *grads), None


# --- How much of the entropy bonus a step has, so that entropy stays near a target ---
#
#     symbol   meaning                                                                  argument
#     H        entropy of the policy that sampled, a token, estimated from its tokens:  -mean(log mu(o)), from mu_logp_N
#     H*       target, nats a token                                                     target
#     s        share of the bonus:   2 (1 - H / H*), at least 0 and at most 1           the result
#
# All of the bonus below half of the target, and none above it. The estimate of H has no bias, because tokens are drawn
# from mu. Skywork-OR1 (arXiv:2505.22312, section 4) adds to or takes from the weight of the bonus after each step, and
# applies it only while H is at most H*. Changed: s depends on the batch alone, so there is no state to save, and a
# repeated step has the same bits. In exchange, entropy may settle anywhere between half of the target and the target.


def bonus_share(mu_logp_N: NDArray[np.float32], target: float) -> float:
    """s of a batch; a target of 0 gives all of the bonus."""
    if target == 0:
        return 1.0
    H = -float(mu_logp_N.astype(np.float64).mean())
    return min(1.0, max(0.0, 2 * (1 - H / target)))

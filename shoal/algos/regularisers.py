"""Regularisers of a policy loss: estimates of the KL divergence, squared ratios, and entropy."""

from typing import Any, Literal

import torch
from torch import Tensor

from shoal.algos.losses import LOG_RATIO_LIMIT, row_rest

# --- The KL divergence of the policy from a reference ---


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


def squared_ratio(logp_N: Tensor, mu_logp_N: Tensor) -> Tensor:
    """P_n of each token; beyond `LOG_RATIO_LIMIT` it is constant."""
    return (logp_N - mu_logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).square()


# --- Log-probability and entropy from logits, in one pass over the vocabulary, and the entropy bonus ---


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

"""Log-probability and entropy from logits, in one pass over the vocabulary, and the entropy bonus.

Called by `train/step`. The logits are the largest tensor of a training step (tokens x vocabulary), so the forward pass
keeps only one tensor of that size, and the backward pass makes only one. It does not depend on the algorithm.

    symbol   meaning
    z        logits / temperature
    p        softmax(z)
    o        the token that was written
    H        entropy of p, nats:   H = -sum_v p_v log p_v
    beta     weight of the bonus

Derivatives, which the backward pass uses:   d log p_o / d z_v = [v = o] - p_v     d H / d z_v = -p_v (log p_v + H)

Axes: N tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor


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

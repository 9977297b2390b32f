"""Losses from preferences and from a teacher: DPO, Bradley-Terry, and distillation."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

# --- Direct preference optimisation (arXiv:2305.18290) ---


class PairTerms(NamedTuple):
    """The loss and the implied rewards."""

    loss: Tensor
    """Scalar: this micro-batch's share of L."""
    chosen_B: Tensor
    """r(y_w), without gradient."""
    rejected_B: Tensor
    """r(y_l), without gradient."""


def dpo_loss(
    chosen_logp_B: Tensor,
    rejected_logp_B: Tensor,
    chosen_ref_B: Tensor,
    rejected_ref_B: Tensor,
    *,
    beta: float,
    num_pairs: float,
) -> PairTerms:
    """L over the given pairs. `num_pairs` is that of the whole batch, so that micro-batches add up."""
    chosen_B = beta * (chosen_logp_B - chosen_ref_B)
    rejected_B = beta * (rejected_logp_B - rejected_ref_B)
    loss = -F.logsigmoid(chosen_B - rejected_B).sum() / num_pairs
    return PairTerms(loss, chosen_B.detach(), rejected_B.detach())


# --- A reward model's loss ---


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor, *, num_pairs: float) -> Tensor:
    """L over the given pairs, scalar. `num_pairs` is that of the whole batch, so that micro-batches add up."""
    return -F.logsigmoid(chosen_B - rejected_B).sum() / num_pairs


# --- On-policy distillation ---


def reverse_kl(logp_NV: Tensor, teacher_logp_NV: Tensor, weight_N: Tensor, *, num_tokens: float) -> Tensor:
    """L, scalar, nats per token. `num_tokens` counts the policy tokens of the whole batch."""
    D_N = (logp_NV.exp() * (logp_NV - teacher_logp_NV.detach())).sum(-1)
    return (weight_N * D_N).sum() / num_tokens


def distillation_advantages(logp_N: Tensor, teacher_logp_N: Tensor) -> Tensor:
    """A of each token, without gradient."""
    return (teacher_logp_N - logp_N).detach()

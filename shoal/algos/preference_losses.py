"""Losses from preferences and from a teacher: DPO, Bradley-Terry, and distillation."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

# --- Direct preference optimisation (arXiv:2305.18290) ---
#
# Learn from pairs of answers without a reward model.
#
#       symbol   meaning                                                                argument
#       y_w      the answer that was preferred; y_l the other one, to the same prompt
#       pi       log-probability of a whole answer under the policy, nats               chosen_logp_B, rejected_logp_B
#       ref      the same under the policy that the run began with; constants           chosen_ref_B, rejected_ref_B
#       beta     how much a nat of change counts: the weight of the KL to ref           beta
#       r        implied reward of an answer:  beta (log pi(y) - log ref(y))
#       L        -(1 / B) sum_b log sigma( r(y_w) - r(y_l) )                            equation 7
#
# The policy that minimises it, over all pairs of answers, is ref exp(reward / beta) / Z, the one that RL with a KL to ref
# would reach; found by counting every answer (`docs/design/results-claims.md`).
#
# Changed from the paper: nothing. A log-probability is the sum over an answer's tokens, not their mean.
#
# Axes: B pairs of a batch.


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
#
# What was preferred scores higher (Bradley and Terry 1952; arXiv:2203.02155, equation 1).
#
#       symbol   meaning                                                              argument
#       s_w      score of the answer that was preferred                               chosen_B
#       s_l      score of the other one, to the same prompt                           rejected_B
#       P        probability of this preference:  sigma(s_w - s_l)
#       L        -(1 / B) sum_b log P
#
# Only differences within a prompt count: adding a number to all scores of a prompt changes nothing. So scores of
# different prompts cannot be compared, unless something else fixes their origin.
#
# Changed from the paper: each prompt gives one pair; of K answers, the caller makes the pairs and divides by their
# number.
#
# Axes: B pairs of a batch.


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor, *, num_pairs: float) -> Tensor:
    """L over the given pairs, scalar. `num_pairs` is that of the whole batch, so that micro-batches add up."""
    return -F.logsigmoid(chosen_B - rejected_B).sum() / num_pairs


# --- On-policy distillation ---
#
# The student writes, and every token is judged by the teacher's log-probs (arXiv:2306.13649).
#
# The student's own samples are what it will meet when it writes alone, and reverse KL makes it take one of the teacher's
# ways rather than the mean of them.
#
#       symbol   meaning                                                                         argument
#       pi       the student; pi(v | s_n) of every token v in the state before token n           logp_NV
#       p        the teacher, in the same states                                                 teacher_logp_NV
#       D_n      sum_v pi(v) (log pi(v) - log p(v)): reverse KL in that state, nats
#       L        (1 / sum_i |o_i|) sum_n D_n; the gradient flows through pi, not through the states
#       A_n      log p(o_n) - log pi(o_n): minus the part of the token that was written          logp_N, teacher_logp_N
#
# `reverse_kl` needs the teacher's whole distribution; `distillation_advantages` only its log-prob of each token that was
# written, and goes into a policy loss in the place of an advantage. In expectation over the token both have the same
# gradient, and the first has less variance.
#
# Changed from the paper: only its on-policy case (lambda = 1) with reverse KL, which MiniLLM (arXiv:2306.08543) takes,
# too. Each token is judged by its own state alone: what it does to later states gets no credit, as in the paper.
#
# Axes: N policy tokens of a micro-batch; V vocabulary.


def reverse_kl(logp_NV: Tensor, teacher_logp_NV: Tensor, weight_N: Tensor, *, num_tokens: float) -> Tensor:
    """L, scalar, nats per token. `num_tokens` counts the policy tokens of the whole batch."""
    D_N = (logp_NV.exp() * (logp_NV - teacher_logp_NV.detach())).sum(-1)
    return (weight_N * D_N).sum() / num_tokens


def distillation_advantages(logp_N: Tensor, teacher_logp_N: Tensor) -> Tensor:
    """A of each token, without gradient."""
    return (teacher_logp_N - logp_N).detach()

"""Direct preference optimisation (arXiv:2305.18290): learn from pairs of answers without a reward model.

Called by `train/preferences`, for micro-batches of pairs. Pure; it knows neither models nor where the pairs come from.

    symbol   meaning                                                                argument
    y_w      the answer that was preferred; y_l the other one, to the same prompt
    pi       log-probability of a whole answer under the policy, nats               chosen_logp_B, rejected_logp_B
    ref      the same under the policy that the run began with; constants           chosen_ref_B, rejected_ref_B
    beta     how much a nat of change counts: the weight of the KL to ref           beta
    r        implied reward of an answer:  beta (log pi(y) - log ref(y))
    L        -(1 / B) sum_b log sigma( r(y_w) - r(y_l) )                            equation 7

The policy that minimises it, over all pairs of answers, is ref exp(reward / beta) / Z, the one that RL with a KL to ref
would reach. `benchmarks/shelf.py` shows it by counting every answer.

Changed from the paper: nothing. A log-probability is the sum over an answer's tokens, not their mean.

Axes: B pairs of a batch.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


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

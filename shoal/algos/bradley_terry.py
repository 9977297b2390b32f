"""A reward model's loss: what was preferred scores higher (Bradley and Terry 1952; arXiv:2203.02155, equation 1).

Called by `train/preferences` with micro-batches of pairs, for reward_model stages of `shoal stages`. Pure; it knows
neither the model that gives the scores nor where the pairs come from.

    symbol   meaning                                                              argument
    s_w      score of the answer that was preferred                               chosen_B
    s_l      score of the other one, to the same prompt                           rejected_B
    P        probability of this preference:  sigma(s_w - s_l)
    L        -(1 / B) sum_b log P

Only differences within a prompt count: adding a number to all scores of a prompt changes nothing. So scores of different
prompts cannot be compared, unless something else fixes their origin.

Changed from the paper: each prompt gives one pair; of K answers, the caller makes the pairs and divides by their number.

Axes: B pairs of a batch.
"""

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen_B: Tensor, rejected_B: Tensor, *, num_pairs: float) -> Tensor:
    """L over the given pairs, scalar. `num_pairs` is that of the whole batch, so that micro-batches add up."""
    return -F.logsigmoid(chosen_B - rejected_B).sum() / num_pairs

"""Supervised fine-tuning: cross entropy on the tokens that the policy should have written.

Called by `train/sft` for each micro-batch. Pure; it knows neither the model nor the source of the examples.

    symbol   meaning                                            argument
    p        the policy's probability of the example's token    exp(logp_N)
    L        loss:  -(1 / sum_i |o_i|) sum_n w_n log p_n

Axes: N policy tokens of a micro-batch.
"""

from torch import Tensor


def sft_loss(logp_N: Tensor, weight_N: Tensor, *, num_tokens: float) -> Tensor:
    """L, scalar, nats per token. `num_tokens` counts the policy tokens of the whole batch."""
    return -(weight_N * logp_N).sum() / num_tokens

"""What a model gives the tokens of rows: the forward pass that the loss, the self-check and the denominators share.

It does not use the loss, the optimiser or a worker's claims.

Axes: B rows of a micro-batch, T input tokens, D width, N policy tokens of a micro-batch, V vocabulary,
P policy tokens of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.algos.chunked_logprobs import in_pieces, logprob_and_entropy_of
from shoal.models.interface import PolicyModel
from shoal.train.memory_estimate import HELD_LOGITS
from shoal.train.packing_flat import PADDED, plan
from shoal.train.packing_padded import MicroBatch
from shoal.train.rows import TrainingRow


def predict(model: PolicyModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each policy token, [N] each. Computes logits only at their positions."""
    hidden_BTD = model.hidden(batch.tokens_BT, batch.families)
    hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, batch.predictor_N)
    head_VD, after = model.head_weight(), model.after_head
    if head_VD is None or after is not None:
        return in_pieces(hidden_ND, head_VD, after, batch.target_N, temperature=temperature, held_values=HELD_LOGITS)
    return logprob_and_entropy_of(hidden_ND, head_VD, batch.target_N, temperature=temperature, held_values=HELD_LOGITS)


@torch.no_grad()
def logprobs_of(
    model: PolicyModel, rows: Sequence[TrainingRow], temperature: float, microbatch_tokens: int, packing: str = PADDED
) -> list[NDArray[np.float32]]:
    """Log-probabilities, float32[P], of each row's policy tokens, nats."""
    logp: dict[int, NDArray[np.float32]] = {}
    for planned in plan(rows, microbatch_tokens, packing):
        logp_N, _ = predict(model, planned.build(rows).on(next(model.named_parameters())[1].device), temperature)
        counts = [len(rows[i].positions_P) for i in planned.members]
        logp |= dict(zip(planned.members, (part.numpy() for part in logp_N.cpu().split(counts)), strict=True))
    return [logp[i] for i in range(len(rows))]

"""How far a student is from its teacher, in both directions, without sampling in any state.

Called by `harness` at every test. It knows neither who learns nor how.

Axes: N policy tokens of a micro-batch, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.envs.rollout import Conversation
from shoal.models.interface import PolicyModel
from shoal.train.packing_padded import collate
from shoal.train.rows import example_row


@torch.no_grad()
def divergences(
    student: PolicyModel, teacher: PolicyModel, talks: Sequence[Conversation], temperature: float
) -> dict[str, float]:
    """Means over the states before the tokens of these conversations, which the student wrote, nats. `kl_nats` is reverse
    KL, of the student's distribution from the teacher's; `forward_kl_nats` is the other one, in the same states."""
    rows = [example_row(talk.tokens, talk.author) for talk in talks]
    batch = collate(rows)
    own_NV, wanted_NV = (
        _logp(model, batch.tokens_BT, batch.predictor_N, temperature) for model in (student, teacher)
    )  # fmt: skip
    return {
        "kl_nats": float((own_NV.exp() * (own_NV - wanted_NV)).sum(-1).mean()),
        "forward_kl_nats": float((wanted_NV.exp() * (wanted_NV - own_NV)).sum(-1).mean()),
    }


def _logp(model: PolicyModel, tokens_BT: Tensor, predictor_N: Tensor, temperature: float) -> Tensor:
    hidden_ND = model.hidden(tokens_BT).flatten(0, 1).index_select(0, predictor_N)
    return torch.log_softmax(model.logits(hidden_ND).double() / temperature, -1)

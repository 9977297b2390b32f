"""Log-probabilities of rows' tokens: a forward pass, the trainer's own denominators of the ratio, and a self-check.

Axes: B rows of a micro-batch, T input tokens, D width, N policy tokens of a micro-batch, V vocabulary,
P policy tokens of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.algos.chunked_logprobs import in_pieces, logprob_and_entropy_of
from shoal.models.checkpoint import load_int8
from shoal.models.interface import PolicyModel
from shoal.models.lora import adapted_by
from shoal.models.memory import HELD_LOGITS
from shoal.models.open_model import AUTO, open_policy
from shoal.models.transformer import Transformer
from shoal.train.microbatches import PADDED, MicroBatch, plan
from shoal.train.rows import TrainingRow, learned

LogprobsAt = Callable[[Path, Sequence[TrainingRow]], list[NDArray[np.float32]]]
"""Log-probs, float32[P], of each row's policy tokens under the policy in a directory, nats."""


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
        logp |= planned.by_row(rows, logp_N)
    return [logp[i] for i in range(len(rows))]


# --- The trainer's own denominators of the importance ratio ---
#
# Where honest machines differ as much as in bfloat16, the checks cannot stop a worker from claiming log-probs that mute
# or amplify its tokens. So the trainer computes each row's log-probs itself, with the published bytes of the version that
# sampled the row, and in its own precision, so that rounding does the same to both sides of the ratio. These log-probs
# depend on the version and the tokens alone, so no worker can change them, and a step that is repeated has the same bits.
# It costs one forward pass.


def with_own_denominators(
    rows: Sequence[TrainingRow], published: Mapping[int, Path], logprobs_at: LogprobsAt
) -> list[TrainingRow]:
    """The rows with log-probs that this machine computed instead of those that their workers claimed. `published` has the
    directory of each version that sampled a row."""
    own: dict[int, TrainingRow] = {}
    for version in sorted({row.version for row in learned(rows)}):
        places = [i for i, row in enumerate(rows) if row.version == version and not row.counts_only]
        logp = logprobs_at(published[version], [rows[place] for place in places])
        own |= {
            place: replace(rows[place], behaviour_logp_P=logp_P) for place, logp_P in zip(places, logp, strict=True)
        }
    return [own.get(place, row) for place, row in enumerate(rows)]


def loaded_anew(
    dtype: str, temperature: float, microbatch_tokens: int, trained_in: torch.dtype, device: str = "cpu"
) -> LogprobsAt:
    """Log-probs under versions that are opened for them. `dtype` is the one in which workers sample: int8 is another
    policy, which is computed in float32; bfloat16 is only a coarser arithmetic of the same one. `trained_in` is the
    trainer's precision."""

    def logprobs_at(directory: Path, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        model = load_int8(directory) if dtype == "int8" else open_policy(directory, trained_in, AUTO)
        return logprobs_of(model.to(device), rows, temperature, microbatch_tokens)

    return logprobs_at


def over_the_base(model: Transformer, temperature: float, microbatch_tokens: int) -> LogprobsAt:
    """Log-probs under versions that are adapters over the base of the model that learns.

    The model has each version's adapter for a moment, so the base is in memory once. The bits are those of the version as
    it would be loaded anew.
    """

    def logprobs_at(directory: Path, rows: Sequence[TrainingRow]) -> list[NDArray[np.float32]]:
        with adapted_by(model, directory):
            return logprobs_of(model, rows, temperature, microbatch_tokens)

    return logprobs_at


# --- The self-check at start-up: generation and training see the same policy ---
#
# A wrong mask, temperature or tokenizer shows as a difference in nats; two honest implementations differ by about 1e-5 in
# float32.


def row_to_check(rows: Sequence[TrainingRow], version: int) -> TrainingRow | None:
    """The longest row that a version sampled; None if it sampled none from which something is learned."""
    return max(
        (row for row in learned(rows) if row.version == version), key=lambda row: len(row.tokens_T), default=None
    )


def largest_gap_nats(logp_P: NDArray[np.float32], row: TrainingRow) -> float:
    """Largest |log-prob of the learner - log-prob of the worker| over the policy tokens of a row."""
    return float(np.abs(logp_P - row.behaviour_logp_P).max())

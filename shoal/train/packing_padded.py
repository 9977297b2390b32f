"""Pack rows into micro-batches, by group or by length, padded on the right, within a budget of padded tokens.

If the rows of a group share a micro-batch, their prompt is computed once. Sorting by length keeps padding small. A
right-padded row needs no mask, because a causal model never looks ahead. The order depends only on the rows, so the same
rows always give the same sums. It knows of the model only when it shares a prompt.

Axes: B rows of a micro-batch, T input tokens, N policy tokens of a micro-batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.models.layers import WORTH_SHARING
from shoal.models.packed_attention import SharedPrefixGroup
from shoal.train.rows import TrainingRow

PASS_TOKENS = 256
"""Fixed cost of a forward and backward pass, in tokens: its operations, and the poor use of a processor by small
matrices. A smaller number makes more and smaller micro-batches; a larger one makes fewer, with more padding."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The input of one forward and backward pass."""

    tokens_BT: Tensor
    """int64, padded with 0. A row ends before its last policy token, which predicts nothing."""
    predictor_N: Tensor
    """int64: index into the flattened [B * T] of the position that predicts each policy token."""
    target_N: Tensor
    """int64: the policy tokens, row by row."""
    behaviour_logp_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    row_N: Tensor
    """int64: the row of each policy token, counted from 0 in the order of the rows. All tokens of a row are here."""
    reference_logp_N: Tensor | None = None
    """None in runs without a reference."""
    families: tuple[SharedPrefixGroup, ...] | None = None
    """Of a flat micro-batch, whose `tokens_BT` is one row with these families in it; None if its rows are padded."""

    def on(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on the device of a model."""
        if device.type == "cpu":
            return self
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: one.to(device) for name, one in held.items() if isinstance(one, Tensor)}
        return replace(self, **moved)


def pack(rows: Sequence[TrainingRow], budget_tokens: int) -> list[list[int]]:
    """Indices of the rows in each micro-batch: longest first, ties in the given order, each row exactly once.

    A micro-batch computes the common start of its rows once (`models/layers`). So there are two good ways to pack: each
    group in micro-batches of its own, which shares prompts; or the rows of all groups sorted by length, which pads less.
    The cheaper one by `cost_of` is taken. The second wins with short prompts and answers of very different lengths.
    Rows x longest row is at most `budget_tokens`, except in a micro-batch of one row.
    """
    groups: dict[tuple[int, int] | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group, []).append(i)
    apart = [part for members in groups.values() for part in _cut(rows, members, budget_tokens)]
    mixed = _cut(rows, range(len(rows)), budget_tokens)
    packed = min(apart, mixed, key=lambda parts: cost_of(rows, parts))
    return sorted(packed, key=lambda members: -input_length(rows[members[0]]))


def cost_of(rows: Sequence[TrainingRow], packed: Sequence[Sequence[int]]) -> int:
    """Cost of the forward and backward passes of these micro-batches: the tokens computed, plus `PASS_TOKENS` each."""
    total = 0
    for members in packed:
        longest = max(input_length(rows[i]) for i in members)
        shared = min(num_shared(rows, members), longest - 1)
        if shared * (len(members) - 1) < WORTH_SHARING:
            shared = 0
        total += PASS_TOKENS + shared + len(members) * (longest - shared)
    return total


def _cut(rows: Sequence[TrainingRow], members: Iterable[int], budget_tokens: int) -> list[list[int]]:
    """Sort rows longest first, and put each into the open micro-batch or begin a new one.

    A new one begins when the budget is full, or when padding all remaining rows to the length of the open one would cost
    more than another pass (`PASS_TOKENS`) and computing the common start again.
    """
    left = sorted(members, key=lambda i: -input_length(rows[i]))
    shared, parts = num_shared(rows, left), list[list[int]]()
    for place, i in enumerate(left):
        longest = input_length(rows[parts[-1][0]]) if parts else 0
        padding = (len(left) - place) * (longest - input_length(rows[i]))
        if parts and (len(parts[-1]) + 1) * longest <= budget_tokens and padding <= shared + PASS_TOKENS:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def num_shared(rows: Sequence[TrainingRow], members: Sequence[int]) -> int:
    """How many input tokens are the same at the start of all these rows."""
    shared = min((input_length(rows[i]) for i in members), default=0)
    for i in members[1:]:
        differ = np.flatnonzero(rows[i].tokens_T[:shared] != rows[members[0]].tokens_T[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared


def collate(rows: Sequence[TrainingRow]) -> MicroBatch:
    """Pad and join rows into one micro-batch."""
    width = max(input_length(row) for row in rows)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    for b, row in enumerate(rows):
        tokens_BT[b, : input_length(row)] = row.tokens_T[: input_length(row)]
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        predictor_N=join([b * width + row.positions_P - 1 for b, row in enumerate(rows)]),
        target_N=join([row.tokens_T[row.positions_P] for row in rows]),
        behaviour_logp_N=join([row.behaviour_logp_P for row in rows]),
        advantage_N=join([row.advantage_P for row in rows]),
        weight_N=join([row.weight_P for row in rows]),
        row_N=places_of(rows),
        reference_logp_N=reference_logp_of(rows),
    )


def silent(batch: MicroBatch) -> MicroBatch:
    """The same micro-batch with weights of 0: its loss and all its gradients are 0."""
    return replace(batch, weight_N=torch.zeros_like(batch.weight_N))


def places_of(rows: Sequence[TrainingRow]) -> Tensor:
    """The place of each policy token's row, int64[N]."""
    return torch.from_numpy(np.repeat(np.arange(len(rows)), [len(row.positions_P) for row in rows]))


def reference_logp_of(rows: Sequence[TrainingRow]) -> Tensor | None:
    """Log-probs under the reference, float32[N]; None if the rows have none."""
    found = [row.reference_logp_P for row in rows if row.reference_logp_P is not None]
    assert len(found) in (0, len(rows)), "some rows have log-probs under the reference and others do not"
    return join(found) if found else None


def input_length(row: TrainingRow) -> int:
    """Tokens of a row up to the last that predicts one."""
    return int(row.positions_P[-1])


def join(parts: list[NDArray[np.float32]] | list[NDArray[np.int64]]) -> Tensor:
    """The arrays one after another, as a tensor."""
    return torch.from_numpy(np.concatenate(parts))

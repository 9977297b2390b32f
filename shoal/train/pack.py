"""Rows to micro-batches: sorted by length, padded on the right, none above a budget of padded tokens.

Called by `train/step`. Sorting keeps padding small; a right-padded row needs no mask, because a causal model never
looks ahead. The order depends on the rows alone, so the same rows always make the same sums. It knows no model.

Axes: B rows of a micro-batch, T input tokens, N policy tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.train.rows import Row


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward and backward pass needs."""

    tokens_BT: Tensor
    """int64, padded with 0. A row ends with the token before its last policy token: later ones predict nothing."""
    predictor_N: Tensor
    """int64: index into the flattened [B * T] of the position that predicts each policy token."""
    target_N: Tensor
    """int64: the policy tokens, row by row."""
    behaviour_logp_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor


def pack(rows: Sequence[Row], budget_tokens: int) -> list[list[int]]:
    """Indices of the rows of each micro-batch: longest first, ties in the order given, each row exactly once.

    No micro-batch exceeds `budget_tokens` rows x longest row, except a single row that alone does.
    """
    lengths = [_input_length(row) for row in rows]
    packed: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -lengths[i]):
        if packed and (len(packed[-1]) + 1) * lengths[packed[-1][0]] <= budget_tokens:
            packed[-1].append(i)
        else:
            packed.append([i])
    return packed


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Pad and join rows into one micro-batch."""
    width = max(_input_length(row) for row in rows)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    for b, row in enumerate(rows):
        tokens_BT[b, : _input_length(row)] = row.tokens_T[: _input_length(row)]
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        predictor_N=_join([b * width + row.positions_P - 1 for b, row in enumerate(rows)]),
        target_N=_join([row.tokens_T[row.positions_P] for row in rows]),
        behaviour_logp_N=_join([row.behaviour_logp_P for row in rows]),
        advantage_N=_join([row.advantage_P for row in rows]),
        weight_N=_join([row.weight_P for row in rows]),
    )


def _input_length(row: Row) -> int:
    return int(row.positions_P[-1])


def _join(parts: list[NDArray[np.float32]] | list[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))

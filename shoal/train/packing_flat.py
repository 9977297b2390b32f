"""Pack rows of different lengths into micro-batches without padding, and choose between this form and that of `pack`.

In the flat form, the rows of a group are one family, whose common start is computed once. Families fill micro-batches of at
most a budget of tokens, all of them real. The order depends only on the rows, so the same rows always give the same sums.

Axes: N policy tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.models.packed_attention import SharedPrefixGroup
from shoal.train.packing_padded import (
    MicroBatch,
    collate,
    input_length,
    join,
    num_shared,
    pack,
    places_of,
    reference_logp_of,
)
from shoal.train.rows import TrainingRow

PADDED, FLAT = "padded", "flat"


@dataclass(frozen=True)
class Plan:
    """One micro-batch to be: the rows in the order of their policy tokens, and, if it is flat, the size of each family."""

    members: tuple[int, ...]
    families: tuple[int, ...] = ()

    def build(self, rows: Sequence[TrainingRow]) -> MicroBatch:
        """The micro-batch, from the rows that were planned."""
        if not self.families:
            return collate([rows[i] for i in self.members])
        left = iter(self.members)
        return collate_flat(rows, [[next(left) for _ in range(size)] for size in self.families])


def plan(rows: Sequence[TrainingRow], budget_tokens: int, packing: str) -> list[Plan]:
    """The micro-batches of these rows, padded or flat; each row exactly once."""
    if packing == PADDED:
        return [Plan(tuple(members)) for members in pack(rows, budget_tokens)]
    return [
        Plan(tuple(i for members in families for i in members), tuple(map(len, families)))
        for families in pack_flat(rows, budget_tokens)
    ]


def pack_flat(rows: Sequence[TrainingRow], budget_tokens: int) -> list[list[list[int]]]:
    """Indices of the rows in each family of each micro-batch; each row exactly once.

    A micro-batch has at most `budget_tokens` tokens, except one of a single row. Families are put, largest first, into the
    first micro-batch that has room (first fit, decreasing). A group too large for one is cut.
    """
    groups: dict[object, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if row.group is None else row.group, []).append(i)
    families = [part for members in groups.values() for part in _cut(rows, members, budget_tokens)]
    families.sort(key=lambda members: -_family_of(rows, members).tokens)
    packed: list[list[list[int]]] = []
    free: list[int] = []
    for members in families:
        size = _family_of(rows, members).tokens
        place = next((i for i, room in enumerate(free) if size <= room), len(packed))
        if place == len(packed):
            packed.append([])
            free.append(budget_tokens)
        packed[place].append(members)
        free[place] -= size
    return packed


def collate_flat(rows: Sequence[TrainingRow], families: Sequence[Sequence[int]]) -> MicroBatch:
    """Join the rows of these families into one row of tokens."""
    tokens, predictors, ordered, shapes = [], [], [], []
    begin = 0
    for members in families:
        family = _family_of(rows, members)
        tokens.append(rows[members[0]].tokens_T[: family.shared])
        own_begin = begin + family.shared
        for i, own in zip(members, family.own, strict=True):
            row = rows[i]
            tokens.append(row.tokens_T[family.shared : family.shared + own])
            places_P = row.positions_P - 1  # the token before predicts
            moved_P = np.where(places_P < family.shared, begin, own_begin - family.shared)
            predictors.append(places_P + moved_P)
            ordered.append(row)
            own_begin += own
        shapes.append(family)
        begin = own_begin
    return MicroBatch(
        tokens_BT=torch.from_numpy(np.concatenate(tokens))[None],
        predictor_N=join(predictors),
        target_N=join([row.tokens_T[row.positions_P] for row in ordered]),
        behaviour_logp_N=join([row.behaviour_logp_P for row in ordered]),
        advantage_N=join([row.advantage_P for row in ordered]),
        weight_N=join([row.weight_P for row in ordered]),
        row_N=places_of(ordered),
        reference_logp_N=reference_logp_of(ordered),
        families=tuple(shapes),
    )


def _cut(rows: Sequence[TrainingRow], members: list[int], budget_tokens: int) -> list[list[int]]:
    """Divide the rows of a group, longest first, into families that fit the budget."""
    parts: list[list[int]] = []
    for i in sorted(members, key=lambda i: -input_length(rows[i])):
        if parts and _family_of(rows, [*parts[-1], i]).tokens <= budget_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _family_of(rows: Sequence[TrainingRow], members: Sequence[int]) -> SharedPrefixGroup:
    """The rows as a family. The last token of a row is its own, though others may have the same."""
    lengths = [input_length(rows[i]) for i in members]
    shared = min(num_shared(rows, members), min(lengths) - 1) if len(members) > 1 else 0
    return SharedPrefixGroup(shared, tuple(length - shared for length in lengths))

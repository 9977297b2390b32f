"""Micro-batches: rows packed for one forward and backward pass, padded or flat, and smaller ones when memory runs out.

Padded micro-batches hold rows of one group or of similar lengths, padded on the right. A right-padded row needs no mask,
because a causal model never looks ahead. A flat one is a single row of real tokens, in which the rows of a group are one
family, whose common start is computed once. Either order depends only on the rows, so the same rows give the same sums.

Axes: B rows of a micro-batch, T input tokens, N policy tokens of a micro-batch.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import StateError
from shoal.models.layers import WORTH_SHARING
from shoal.models.packed_attention import SharedPrefixGroup
from shoal.train.rows import TrainingRow

PADDED, FLAT = "padded", "flat"

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

    def silent(self) -> "MicroBatch":
        """The same micro-batch with weights of 0: its loss and all its gradients are 0."""
        return replace(self, weight_N=torch.zeros_like(self.weight_N))


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

    def by_row(self, rows: Sequence[TrainingRow], value_N: Tensor) -> dict[int, NDArray[np.float32]]:
        """Values of the micro-batch's policy tokens by the index of their row, float32[P]."""
        counts = [len(rows[i].positions_P) for i in self.members]
        return dict(zip(self.members, (part.numpy() for part in value_N.cpu().split(counts)), strict=True))


def plan(rows: Sequence[TrainingRow], budget_tokens: int, packing: str) -> list[Plan]:
    """The micro-batches of these rows, padded or flat; each row exactly once."""
    if packing == PADDED:
        return [Plan(tuple(members)) for members in pack(rows, budget_tokens)]
    return [
        Plan(tuple(i for members in families for i in members), tuple(map(len, families)))
        for families in pack_flat(rows, budget_tokens)
    ]


# --- Padded ---


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


def collate(rows: Sequence[TrainingRow]) -> MicroBatch:
    """Pad and join rows into one micro-batch."""
    width = max(input_length(row) for row in rows)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    for b, row in enumerate(rows):
        tokens_BT[b, : input_length(row)] = row.tokens_T[: input_length(row)]
    return _joined(tokens_BT, [b * width + row.positions_P - 1 for b, row in enumerate(rows)], rows)


# --- Flat ---


def pack_flat(rows: Sequence[TrainingRow], budget_tokens: int) -> list[list[list[int]]]:
    """Indices of the rows in each family of each micro-batch; each row exactly once.

    A micro-batch has at most `budget_tokens` tokens, except one of a single row. Families are put, largest first, into the
    first micro-batch that has room (first fit, decreasing). A group too large for one is cut.
    """
    groups: dict[object, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if row.group is None else row.group, []).append(i)
    families = [part for members in groups.values() for part in _families(rows, members, budget_tokens)]
    sized = sorted(((_family_of(rows, members).tokens, members) for members in families), key=lambda one: -one[0])
    packed: list[list[list[int]]] = []
    free: list[int] = []
    for size, members in sized:
        place = next((i for i, room in enumerate(free) if size <= room), len(packed))
        if place == len(packed):
            packed.append([])
            free.append(budget_tokens)
        packed[place].append(members)
        free[place] -= size
    return packed


def collate_flat(rows: Sequence[TrainingRow], families: Sequence[Sequence[int]]) -> MicroBatch:
    """Join the rows of these families into one row of tokens."""
    tokens, predictors, shapes = [], [], []
    begin = 0
    for members in families:
        family = _family_of(rows, members)
        tokens.append(rows[members[0]].tokens_T[: family.shared])
        own_begin = begin + family.shared
        for i, own in zip(members, family.own, strict=True):
            tokens.append(rows[i].tokens_T[family.shared : family.shared + own])
            places_P = rows[i].positions_P - 1  # the token before predicts
            predictors.append(places_P + np.where(places_P < family.shared, begin, own_begin - family.shared))
            own_begin += own
        shapes.append(family)
        begin = own_begin
    ordered = [rows[i] for members in families for i in members]
    return _joined(np.concatenate(tokens)[None], predictors, ordered, tuple(shapes))


def _families(rows: Sequence[TrainingRow], members: list[int], budget_tokens: int) -> list[list[int]]:
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


# --- Rows ---


def num_shared(rows: Sequence[TrainingRow], members: Sequence[int]) -> int:
    """How many input tokens are the same at the start of all these rows."""
    shared = min((input_length(rows[i]) for i in members), default=0)
    for i in members[1:]:
        differ = np.flatnonzero(rows[i].tokens_T[:shared] != rows[members[0]].tokens_T[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared


def input_length(row: TrainingRow) -> int:
    """Tokens of a row up to the last that predicts one."""
    return int(row.positions_P[-1])


def _joined(
    tokens_BT: NDArray[np.int64], predictors: list[NDArray[np.int64]], rows: Sequence[TrainingRow],
    families: tuple[SharedPrefixGroup, ...] | None = None,
) -> MicroBatch:  # fmt: skip
    references = [row.reference_logp_P for row in rows if row.reference_logp_P is not None]
    assert len(references) in (0, len(rows)), "some rows have log-probs under the reference and others do not"
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        predictor_N=join(predictors),
        target_N=join([row.tokens_T[row.positions_P] for row in rows]),
        behaviour_logp_N=join([row.behaviour_logp_P for row in rows]),
        advantage_N=join([row.advantage_P for row in rows]),
        weight_N=join([row.weight_P for row in rows]),
        row_N=places_of(rows),
        reference_logp_N=join(references) if references else None,
        families=families,
    )


def places_of(rows: Sequence[TrainingRow]) -> Tensor:
    """The place of each policy token's row, int64[N]."""
    return torch.from_numpy(np.repeat(np.arange(len(rows)), [len(row.positions_P) for row in rows]))


def join(parts: list[NDArray[np.float32]] | list[NDArray[np.int64]]) -> Tensor:
    """The arrays one after another, as a tensor."""
    return torch.from_numpy(np.concatenate(parts))


# --- The parts of a batch that an update learns from, if a step takes several updates from different groups ---
#
# The order depends only on the rows, so a repeated step has the same parts.


def minibatches(rows: Sequence[TrainingRow], count: int) -> list[Sequence[TrainingRow]]:
    """At most `count` parts of whole groups, as equal in groups as can be; each row exactly once.

    Groups are dealt out in turn, because neighbours in a batch are alike: they were accepted one after another.
    """
    if count == 1:
        return [rows]
    groups: dict[Hashable, list[TrainingRow]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if row.group is None else row.group, []).append(row)
    dealt = list(groups.values())
    parts = [[row for group in dealt[k::count] for row in group] for k in range(count)]
    return [part for part in parts if part]


# --- What to do when memory runs out in a training step ---
#
# Which errors say so, and which micro-batches are tried next.
#
# Linux may also kill a process that takes more memory than there is; nothing here can prevent that.


def is_shortage(error: Exception) -> bool:
    """Whether an error says that memory could not be had. On a CPU, torch has no class of its own for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def smaller_budget(
    rows: Sequence[TrainingRow], packed: Sequence[Plan], budget_tokens: int, packing: str, cause: str
) -> int:
    """The largest half, quarter and so on of a budget that cuts these micro-batches in smaller ones.

    Raises `StateError` if each has one row already.
    """
    if all(len(planned.members) == 1 for planned in packed):
        longest = max(len(row.tokens_T) for row in rows)
        raise StateError(
            f"memory runs out in a training step on one row at a time, the longest of {longest} tokens; {_free_mb():.0f} "
            f'MB are free ({cause}). Set train.recompute = "layers" or train.moments = "8bit" in a new run, lower '
            "sampling.max_tokens, or train where there is more memory"
        )
    smaller = budget_tokens // 2
    while smaller > 1 and plan(rows, smaller, packing) == packed:
        smaller //= 2
    return max(1, smaller)


def free_cached() -> None:
    """Give back what torch keeps of freed memory of a GPU: pieces of other sizes are needed now."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _free_mb() -> float:
    if torch.cuda.is_initialized():
        return torch.cuda.mem_get_info()[0] / 1e6
    return psutil.virtual_memory().available / 1e6

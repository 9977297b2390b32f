"""Mini-batches of a step, and the micro-batches that fit into memory."""

from collections.abc import Hashable, Sequence

import psutil
import torch

from shoal.errors import StateError
from shoal.train.packing_flat import Plan, plan
from shoal.train.rows import TrainingRow

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

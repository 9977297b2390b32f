"""Which environment and which task a slot seed decides: the one place where tasks are drawn.

Called by the ledger, by `shoal calibrate` and by recipes/one_file.py, each with a draw table. Without a curriculum, the
table holds the weights of the run file, and all tasks of an environment are equally likely. It knows no state and no
environment.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.protocol.wire import domain_hash, float_sum


class Pool(NamedTuple):
    """Tasks that are drawn more or less often than the others of their environment."""

    weight: float
    """Of each of its tasks; a task in no pool has weight 1. 0: they are never drawn."""
    tasks: tuple[int, ...]


@dataclass(frozen=True)
class EnvDraw:
    """One environment of a draw table."""

    label: str
    weight: float
    """Share of the slots, relative to the weights of the other environments."""
    num_tasks: int
    """Tasks of which one is drawn: all of the environment, or those that are listed."""
    pools: tuple[Pool, ...] = ()
    """No task is in two of them. Environments of which no task can be drawn have no slots."""
    listed: tuple[int, ...] = ()
    """The tasks of which one is drawn, ascending; empty for 0 to num_tasks - 1."""

    def has(self, task: int) -> bool:
        """Whether a task may be drawn."""
        if not self.listed:
            return 0 <= task < self.num_tasks
        place = bisect_left(self.listed, task)
        return place < len(self.listed) and self.listed[place] == task

    @cached_property
    def pooled(self) -> list[int]:
        """Tasks that are in a pool, ascending: by their places in the list, if there is one."""
        tasks = sorted(task for pool in self.pools for task in pool.tasks)
        return [bisect_left(self.listed, task) for task in tasks] if self.listed else tasks

    @cached_property
    def shares(self) -> list[float]:
        """Sum of the weights of the tasks in no pool, and of those in each pool."""
        return [float(self.num_tasks - len(self.pooled)), *(pool.weight * len(pool.tasks) for pool in self.pools)]


DrawTable = Sequence[EnvDraw]
"""What tasks are drawn from. The order of the environments counts: it is that of the run file."""


def draw_task(slot: bytes, table: DrawTable) -> tuple[str, int]:
    """Label of the environment, and index of the task, that a slot seed decides.

    Environments are drawn by weight; then a pool by the sum of its tasks' weights; then a task of it, uniformly. With 64
    bits, the bias of the remainder is negligible.
    """
    bits = domain_hash("task", slot)
    env = table[_pick(bits[:8], [env.weight if any(env.shares) else 0.0 for env in table])]
    number = int.from_bytes(bits[8:16], "big")
    pool = _pick(bits[16:24], env.shares) if env.pools else 0
    if pool:
        tasks = env.pools[pool - 1].tasks
        return env.label, tasks[number % len(tasks)]
    place = _unpooled(env, number % (env.num_tasks - len(env.pooled)))
    return env.label, env.listed[place] if env.listed else place


def _pick(bits: bytes, weights: Sequence[float]) -> int:
    """The index that 64 bits decide, by weight; never one of weight 0."""
    point = int.from_bytes(bits, "big") / 2**64 * float_sum(weights)
    known = [index for index, weight in enumerate(weights) if weight > 0]  # guard: retired-is-not-drawn
    for index in known[:-1]:
        if point < weights[index]:
            return index
        point -= weights[index]
    return known[-1]


def _unpooled(env: EnvDraw, rank: int) -> int:
    """The task, or its place in the list, with this rank among those in no pool, counted from 0."""
    low, high = 0, len(env.pooled)
    while low < high:  # find how many pooled tasks come before it
        middle = (low + high) // 2
        low, high = (middle + 1, high) if env.pooled[middle] - middle <= rank else (low, middle)
    return rank + low

"""Draws of tasks: by seed from all tasks, from a list, or by difficulty."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from shoal.protocol.encoding import WireError, digest, domain_hash, float_sum, from_json, to_json
from shoal.protocol.field_types import FINITE, Count, Message, PositiveShare, Share, Whole

# --- draws that follow solve rates: `[difficulty]` of a run file ---


PoolWeight = Annotated[
    float,
    Meta(
        gt=0,
        le=FINITE,
        description="A task of weight 0 would never be measured again; difficulty.retire_after is for tasks that need no "
        "more work",
    ),
]


class Difficulty(Message, frozen=True):
    """How draws follow solve rates. A run without this section draws by `weight`, and all tasks of an environment alike."""

    curriculum: bool = False
    """Draw more from environments whose groups teach more: those of which about half the rollouts are solved. For runs with
    several [[envs]], such as easy and hard ones."""
    floor: PositiveShare = 0.1
    """Smallest share of its `weight` that the curriculum leaves an environment, so that none is forgotten. The environment
    that teaches most keeps all of its own."""
    window_groups: Count = 32
    """Groups of an environment over which the curriculum smooths. Fewer follow the policy faster, but with more noise."""
    pools: bool = False
    """Draw easy and hard tasks less often than others. For environments whose tasks come up again and again."""
    easy: Share = 0.8
    """A task is easy if at least this share of its latest group is solved."""
    hard: Share = 0.2
    """A task is hard if at most this share of its latest group is solved."""
    easy_weight: PoolWeight = 0.2
    """How often an easy task is drawn; a task that is neither easy nor hard has 1."""
    hard_weight: PoolWeight = 0.2
    """How often a hard task is drawn."""
    retire_after: Whole = 0
    """A task is not drawn any more after this many groups in a row that are solved whole; 0 retires none. Needs `pools`."""


class DifficultyRule(Difficulty, frozen=True, kw_only=True):
    """The same in a run's first event, with the rewards that count as solved."""

    solved: dict[str, float]
    """By label: a rollout with at least this reward is solved."""


# --- the environment and the task that a slot seed decides ---
#
# Without a curriculum, the draw table has the weights of the run file, and all tasks of an environment are equally likely.


class TaskPool(NamedTuple):
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
    pools: tuple[TaskPool, ...] = ()
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


# --- a list of tasks that a run draws from, in the place of all tasks of an environment ---
#
# The first event of a run's log holds it, so anyone who replays the log draws from the same list.


MAX_LISTED = 1 << 16
"""Limit on the tasks of a list: the first event of a log, which holds it, stays below a megabyte."""


class TaskList(Message, frozen=True):
    """Tasks of one environment."""

    source: str
    """SHA-256 of the environment's source, as in the first event."""
    args: dict[str, Any]
    """Its arguments: with others, the same index is another task."""
    num_tasks: int
    """Tasks of the environment."""
    tasks: tuple[int, ...]
    """Indices, ascending."""

    @property
    def digest(self) -> str:
        """SHA-256, hex, of its bytes: the name by which a run file and a log pin it."""
        return digest(to_json(self))

    def flaw(self, source: str, args: Mapping[str, Any], num_tasks: int) -> str:
        """The reason why it does not fit this environment; empty if it fits."""
        if (self.source, self.args, self.num_tasks) != (source, dict(args), num_tasks):
            return "it was measured on another environment, or with other args"
        return flaw_of(self)


def flaw_of(found: TaskList) -> str:
    """What is wrong with a list in itself; empty if nothing."""
    tasks = found.tasks
    if not 0 < len(tasks) <= MAX_LISTED:
        return f"it has {len(tasks)} tasks, and a list has 1 to {MAX_LISTED}"
    if any(a >= b for a, b in pairwise(tasks)) or not 0 <= tasks[0] <= tasks[-1] < found.num_tasks:
        return f"its tasks are not ascending, from 0 to {found.num_tasks - 1}"
    return ""


def read_task_list(data: bytes) -> TaskList:
    """The list that these bytes are. Raises `WireError`."""
    found = from_json(data, TaskList)
    if flaw := flaw_of(found):
        raise WireError(flaw)
    if to_json(found) != data:  # guard: one-spelling-of-a-task-list
        raise WireError("it is not written in the one way that its digest is made from")
    return found

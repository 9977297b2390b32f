"""How draws follow solve rates: from the groups of a version to the next draw table.

Pure: groups and records in, a change or a table out. It knows no state, no seed and no policy.

A group's *solve rate* p is the share of its rollouts that are solved. Most can be learned from it at p = 1/2, and nothing
at 0 or 1. With `curriculum`, an environment's learnability is the mean of 4 p (1 - p) over its latest groups. Its weight is
that of the run file, times its share of the learnability of the best environment, but at least times `floor`.
Learnability is from "No Regrets" (Rutherford et al. 2024, arXiv:2408.15099). It is averaged over groups and not taken of
the environment's mean, because an environment of which half the tasks are always solved, and half never, teaches nothing.
With `pools`, a task is easy, hard or neither by its latest group, and retired for good once it was solved often enough.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shoal.protocol.task_draws import DifficultyRule, DrawTable, EnvDraw, TaskPool

EASY, NORMAL, HARD, RETIRED = "easy", "normal", "hard", "retired"

FIRST_GROUPS = 4
"""An environment begins as if it had had so many groups with a solve rate of 1/2, so that one group decides little."""

REWARD_ROUNDING = 1e-9
"""A sum of weighted parts that should be 1 may be less by this."""


class SolvedRecord(msgspec.Struct):
    """What is known of one environment's tasks. Solve rates are smoothed over `Difficulty.window_groups`."""

    groups: int = 0
    """Counted so far."""
    rate: float = 0.5
    """Share of rollouts that are solved."""
    learnable: float = 1.0
    """Mean of 4 p (1 - p) over groups with solve rate p."""
    weight: float = 0.0
    """In the newest draw table; 0 is that of the run file."""
    pools: dict[int, str] = {}
    """Tasks that are not in the normal pool, with their pools in the newest draw table."""
    streaks: dict[int, int] = {}
    """Tasks whose latest groups were solved whole, with the number of these groups. Only where tasks are retired."""


class TableChange(msgspec.Struct, frozen=True):
    """Where the draw table of a version differs from that of the version before."""

    weights: dict[str, float] = {}
    """Weights by label."""
    moved: dict[str, dict[str, tuple[int, ...]]] = {}
    """By label and pool: tasks that are in this pool now, ascending."""


class SolvedGroup(NamedTuple):
    """A group that counts."""

    env: str
    """Label."""
    task: int
    solve_rate: float


Records = dict[str, SolvedRecord]
"""By label. An environment without groups has none."""


def solve_rate(rewards: Sequence[float], solved: float) -> float:
    """Share of rollouts with at least the reward `solved`."""
    return sum(reward >= solved - REWARD_ROUNDING for reward in rewards) / len(rewards)


def change_after(groups: Sequence[SolvedGroup], envs: DrawTable, records: Records, rule: DifficultyRule) -> TableChange:
    """What the table changes after these groups, which are in the order of their slots. `envs` is the table of the run
    file. The records are left as they are: `add_groups` adds to them."""
    weights = _weights(groups, envs, records, rule) if rule.curriculum else {}
    return TableChange(weights, _moves(groups, envs, records, rule) if rule.pools else {})


def add_groups(
    groups: Sequence[SolvedGroup], change: TableChange, envs: DrawTable, records: Records, rule: DifficultyRule
) -> None:
    """Add groups and a change to the records, in place. Raises `ValueError` for a change that no rules give."""
    for env in envs:
        own = [group for group in groups if group.env == env.label]
        if own:
            record = records.setdefault(env.label, SolvedRecord())
            record.rate, record.learnable = _smoothed(record, [group.solve_rate for group in own], rule)
            record.groups += len(own)
            if rule.retire_after:
                record.streaks = {task: n for task, n in (record.streaks | _streaks(record, own)).items() if n}
    apply_change(change, envs, records)


def apply_change(change: TableChange, envs: DrawTable, records: Records) -> None:
    """Add a change alone to the records, in place. Raises `ValueError` for one that no rules give."""
    by_label = {env.label: env for env in envs}
    for label, weight in change.weights.items():
        if label not in by_label or not weight > 0:  # guard: weight-of-a-known-environment
            raise ValueError(f"no environment {label!r} has a weight of {weight}")
        records.setdefault(label, SolvedRecord()).weight = weight
    for label, moved in change.moved.items():
        pools = records.setdefault(label, SolvedRecord()).pools
        for pool, tasks in moved.items():
            known = label in by_label and all(by_label[label].has(task) for task in tasks)
            # guard: tasks-of-known-pools
            if pool not in (EASY, NORMAL, HARD, RETIRED) or not known:
                raise ValueError(f"environment {label!r} has no such tasks, or no pool {pool!r}")
            for task in tasks:
                pools[task] = pool
                if pool == NORMAL:
                    del pools[task]
    if not _left(envs, records):  # guard: a-task-is-left
        raise ValueError("all tasks of the run are retired")


def table_after(envs: DrawTable, records: Mapping[str, SolvedRecord], rule: DifficultyRule) -> DrawTable:
    """The draw table that the records amount to."""
    weight_of = {EASY: rule.easy_weight, HARD: rule.hard_weight, RETIRED: 0.0}
    table = []
    for env in envs:
        record = records.get(env.label, SolvedRecord())
        pooled: dict[str, list[int]] = {pool: [] for pool in weight_of}
        for task, pool in record.pools.items():
            pooled[pool].append(task)
        pools = tuple(TaskPool(weight_of[pool], tuple(sorted(tasks))) for pool, tasks in pooled.items() if tasks)
        table.append(EnvDraw(env.label, record.weight or env.weight, env.num_tasks, pools, env.listed))
    return table


def _weights(
    groups: Sequence[SolvedGroup], envs: DrawTable, records: Mapping[str, SolvedRecord], rule: DifficultyRule
) -> dict[str, float]:
    """Weights that change. They are rounded, so that small changes are not written."""
    learnable = {}
    for env in envs:
        own = [group.solve_rate for group in groups if group.env == env.label]
        _, learnable[env.label] = _smoothed(records.get(env.label, SolvedRecord()), own, rule)
    best, weights = max(learnable.values()) or 1.0, {}
    for env in envs:
        share = max(rule.floor, learnable[env.label] / best)  # guard: none-is-forgotten
        weight = float(f"{env.weight * share:.3g}")
        before = records[env.label].weight if env.label in records else 0.0
        if weight != (before or env.weight):
            weights[env.label] = weight
    return weights


def _smoothed(record: SolvedRecord, solve_rates: Iterable[float], rule: DifficultyRule) -> tuple[float, float]:
    """Rate and learnability of a record after these groups: means at first, and moving averages after a window."""
    rate, learnable = record.rate, record.learnable
    for groups, found in enumerate(solve_rates, record.groups + FIRST_GROUPS + 1):
        step = 1.0 / min(groups, rule.window_groups)
        rate += step * (found - rate)
        learnable += step * (4.0 * found * (1.0 - found) - learnable)
    return rate, learnable


def _streaks(record: SolvedRecord, groups: Sequence[SolvedGroup]) -> dict[int, int]:
    streaks: dict[int, int] = {}
    for group in groups:
        before = streaks.get(group.task, record.streaks.get(group.task, 0))
        streaks[group.task] = before + 1 if group.solve_rate == 1.0 else 0
    return streaks


def _moves(
    groups: Sequence[SolvedGroup], envs: DrawTable, records: Records, rule: DifficultyRule
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Tasks that change their pool. The run keeps one task that is not retired: a run that has only this one left pauses,
    because its groups have no signal."""
    left, moves = _left(envs, records), {}
    for env in envs:
        own, record = [group for group in groups if group.env == env.label], records.get(env.label, SolvedRecord())
        streaks, moved = _streaks(record, own), dict[str, list[int]]()
        for task, found in sorted({group.task: group.solve_rate for group in own}.items()):
            before = record.pools.get(task, NORMAL)
            pool = EASY if found >= rule.easy else HARD if found <= rule.hard else NORMAL
            if rule.retire_after and streaks[task] >= rule.retire_after and left > 1:  # guard: last-task-stays
                pool = RETIRED
            # A group of a version before the task was retired changes nothing.
            if before in (pool, RETIRED):  # guard: retired-for-good
                continue
            moved.setdefault(pool, []).append(task)
            left -= pool == RETIRED
        if moved:
            moves[env.label] = {pool: tuple(tasks) for pool, tasks in sorted(moved.items())}
    return moves


def _left(envs: DrawTable, records: Mapping[str, SolvedRecord]) -> int:
    retired = (pool == RETIRED for record in records.values() for pool in record.pools.values())
    return sum(env.num_tasks for env in envs) - sum(retired)

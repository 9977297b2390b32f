"""Tasks are drawn by the weights of their environments and pools; a table without pools draws as it always did."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.encoding import domain_hash, float_sum
from shoal.protocol.seed_chain import sample_seed
from shoal.protocol.task_draws import EnvDraw, TaskPool, draw_task

SEED = bytes(range(32))
SEEDS = [sample_seed(SEED, index) for index in range(6000)]


def plain(weights: list[float], sizes: list[int]) -> list[EnvDraw]:
    return [EnvDraw(str(i), weight, size) for i, (weight, size) in enumerate(zip(weights, sizes, strict=True))]


def plain_draw(slot: bytes, weights: list[float], num_tasks: list[int]) -> tuple[int, int]:
    """The draw of a run whose draws follow no solve rates."""
    bits = domain_hash("task", slot)
    point = int.from_bytes(bits[:8], "big") / 2**64 * float_sum(weights)
    env = 0
    while env < len(weights) - 1 and point >= weights[env]:
        point -= weights[env]
        env += 1
    return env, int.from_bytes(bits[8:16], "big") % num_tasks[env]


@given(st.binary(min_size=32, max_size=32), st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_a_table_without_pools_draws_by_the_weights_and_numbers_of_tasks_alone(
    seed: bytes, weights: list[float]
) -> None:
    sizes = [index + 1 for index in range(len(weights))]
    env, task = plain_draw(seed, weights, sizes)
    assert draw_task(seed, plain(weights, sizes)) == (str(env), task)
    assert 0 <= task < sizes[env]


def test_each_task_is_drawn_in_proportion_to_the_weight_of_its_pool() -> None:
    env = EnvDraw("a", 1.0, 10, (TaskPool(0.25, (7, 2)), TaskPool(0.5, (0,)), TaskPool(0.0, (9, 4))))
    counts = Counter(task for _, task in (draw_task(seed, [env]) for seed in SEEDS))
    total = 5 * 1 + 2 * 0.25 + 0.5
    for task in range(10):
        weight = {7: 0.25, 2: 0.25, 0: 0.5, 9: 0.0, 4: 0.0}.get(task, 1.0)
        assert counts[task] / len(SEEDS) == pytest.approx(weight / total, abs=0.02)
    assert counts[9] == counts[4] == 0


def test_an_environment_of_which_no_task_can_be_drawn_has_no_slots() -> None:
    spent = EnvDraw("spent", 100.0, 2, (TaskPool(0.0, (1, 0)),))
    for table in ([EnvDraw("a", 1.0, 3), spent], [spent, EnvDraw("a", 1.0, 3)]):
        assert {draw_task(seed, table)[0] for seed in SEEDS[:200]} == {"a"}


def test_the_highest_draw_does_not_fall_on_a_retired_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**64 - 1 rounds to 2**64 as a float: the point then lies at the end of all weights."""
    monkeypatch.setattr("shoal.protocol.task_draws.domain_hash", lambda *parts: b"\xff" * 32)
    spent = EnvDraw("spent", 1.0, 1, (TaskPool(0.0, (0,)),))
    table = [EnvDraw("a", 1.0, 3, (TaskPool(0.0, (2,)),)), spent]
    assert draw_task(SEED, table) == ("a", (2**64 - 1) % 2)


@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.binary(min_size=32, max_size=32))
def test_tasks_in_no_pool_are_numbered_without_gaps(size: int, listed: set[int], seed: bytes) -> None:
    pooled = tuple(sorted(task for task in listed if task < size))
    left = [task for task in range(size) if task not in pooled]
    if left:
        number = int.from_bytes(domain_hash("task", seed)[8:16], "big")
        assert draw_task(seed, [EnvDraw("a", 1.0, size, (TaskPool(0.0, pooled),))]) == ("a", left[number % len(left)])

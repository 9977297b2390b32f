"""Whole runs with the real roles over an in-memory network: what a run promises whoever serves it."""

import asyncio
import sys
from pathlib import Path

import pytest

from shoal.engine.cheats import CHEATS
from shoal.metrics import read_metrics
from tests.roles.town import Town, tiny_run

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import one_file


@pytest.fixture(scope="module")
def single_file_weights(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    return one_file.train(tiny_run(), out, out.parent)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_workers_gives_the_bytes_of_one_file(tmp_path, single_file_weights, num_workers):
    town = Town(tmp_path / "run", tiny_run())
    workers = [town.worker(f"worker-{i}") for i in range(num_workers)]
    asyncio.run(town.live(town.trainer(), town.validator(), *workers))
    assert town.weights() == single_file_weights
    assert town.audit().findings == []


@pytest.mark.parametrize("seed", [1, 2])
def test_a_lying_network_changes_nothing(tmp_path, single_file_weights, seed):
    town = Town(tmp_path / "run", tiny_run(), fault_rate=0.2, seed=seed)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0"), town.worker("worker-1")))
    assert town.weights() == single_file_weights
    assert town.audit().findings == []


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheating_worker_earns_nothing_and_changes_nothing(tmp_path, single_file_weights, cheat):
    town = Town(tmp_path / "run", tiny_run())
    cheater, honest = town.worker("cheater", cheat), town.worker("honest")
    asyncio.run(town.live(town.trainer(), town.validator(), cheater, honest))
    state = town.desk.state
    assert state.nodes[honest.key].credits > 0 and state.nodes[honest.key].refused == 0
    if cheat != "old-weights":  # the first version is the right one: what it makes of that is honest
        assert state.nodes[cheater.key].credits == 0
        assert state.nodes[cheater.key].refused > 0
    assert town.weights() == single_file_weights


def test_an_asynchronous_run_ends_with_bounded_staleness_and_its_metrics(tmp_path):
    config = tiny_run(rollouts={"max_staleness": 1}, steps=4)
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0"), town.worker("worker-1")))
    lines = read_metrics(town.folder.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(set(line["staleness_rollouts"]) <= {"0", "1"} for line in lines)
    assert lines[0]["selfcheck_gap_nats"] < 1e-3
    assert town.audit().findings == []


def test_a_worker_that_stops_gives_its_lease_back(tmp_path):
    town = Town(tmp_path / "run", tiny_run())

    async def story():
        leaver, stayer = town.worker("leaver"), town.worker("stayer")

        async def leave_soon():
            while not town.desk.state.leases:
                await asyncio.sleep(0.05)
            leaver.stopping.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(leave_soon())
            group.create_task(town.live(town.trainer(), town.validator(), leaver, stayer))

    asyncio.run(story())
    assert town.desk.state.phase == "ended"
    assert all(node.lapsed == 0 for node in town.desk.state.nodes.values())

"""Whole runs with the real roles over an in-memory network: what holds whichever nodes take part."""

import asyncio
import re
import time
from collections import Counter

import numpy as np
import pytest

from shoal.config import TinyPolicy
from shoal.engine.dishonest import CHEATS
from shoal.engine.native import LocalEngine
from shoal.errors import PeerError
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.commands import Admin
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.pools import PoolsChanged
from shoal.metrics import read_metrics
from shoal.models.random_model import make_tiny
from shoal.protocol import messages as t
from shoal.protocol.encoding import from_msgpack
from shoal.roles.coordinator.status import StatusBoard, batch_of
from shoal.roles.node.session import Session
from shoal.weights import engine_loader
from tests.envs import musing, pile
from tests.nightly import first_of
from tests.roles.in_memory_run import Town, tiny_run, weights_of_one_file


@pytest.fixture(scope="module")
def single_file_weights(tmp_path_factory):
    return weights_of_one_file(tiny_run(), tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize("num_workers", first_of(3, 1))
def test_any_number_of_workers_gives_the_bytes_of_one_file(tmp_path, single_file_weights, num_workers):
    town = Town(tmp_path / "run", tiny_run())
    workers = [town.worker(f"worker-{i}") for i in range(num_workers)]
    asyncio.run(town.live(town.trainer(), town.validator(), *workers))
    assert town.weights() == single_file_weights
    assert town.audit().findings == []


def test_rollouts_with_several_rows_give_the_bytes_of_one_file(tmp_path):
    """Two seats of one policy, and histories that leave out thoughts; with proofs of activations."""
    policy = tmp_path / "policy"
    make_tiny(TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, max_positions=96), policy, 5, "float32")
    envs = [{"name": module.__file__} for module in (pile, musing)]
    config = tiny_run(
        envs=envs, steps=2, policy={"path": str(musing.with_template(policy))}, verify={"proofs": "toploc"},
        sampling={"max_turn_tokens": 6, "max_tokens": 96, "max_rollout_tokens": 240}, storage={"retain": "all"},
    )  # fmt: skip
    town = Town(tmp_path / "run", config)
    workers = [town.worker(f"worker-{i}") for i in range(2)]
    asyncio.run(town.live(town.trainer(), town.validator(), *workers))
    assert town.audit().findings == []
    assert all(town.desk.state.members[worker.key].refused == 0 for worker in workers)
    rows = Counter()
    for name in town.desk.state.submissions:
        for data in from_msgpack(town.desk.blobs.get(name), t.Submission).groups:
            group = from_msgpack(data, t.Group)
            rows[group.env] = max(rows[group.env], *(len(rollout.rows()) for rollout in group.rollouts))
    assert rows == {"pile": 2, "musing": 3}
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")


TWO_OF_ONE_NAME = [
    {"name": "arithmetic", "label": "easy", "args": {"digits": 1}},
    {"name": "arithmetic", "label": "hard", "args": {"digits": 4, "num_tasks": 1000}},
]


def test_two_environments_of_one_name_are_both_played_with_their_own_arguments(tmp_path):
    config = tiny_run(envs=TWO_OF_ONE_NAME, steps=2, storage={"retain": "all"})
    town = Town(tmp_path / "run", config)
    worker = town.worker("worker-0")
    asyncio.run(town.live(town.trainer(), town.validator(), worker))
    assert town.desk.state.members[worker.key].refused == 0 and town.audit().findings == []
    digits = {"easy": Counter(), "hard": Counter()}
    for name, submission in town.desk.state.submissions.items():
        assert submission.decided
        for data in from_msgpack(town.desk.blobs.get(name), t.Submission).groups:
            group = from_msgpack(data, t.Group)
            opening = worker.session.envs[group.env].reset(worker.session.envs[group.env].task(group.task))[1][0][
                "content"
            ]
            digits[group.env][max(map(len, re.findall(r"\d+", opening)))] += 1
    assert set(digits["easy"]) == {1} and 4 in digits["hard"]
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")


def test_a_mix_reports_the_reward_of_each_environment(tmp_path):
    config = tiny_run(envs=TWO_OF_ONE_NAME, steps=2, storage={"retain": "all"})
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    state, lines = town.desk.state, read_metrics(town.folder.metrics)
    assert len(lines) == 2
    for line in lines:
        rewards = {"easy": [], "hard": []}
        for member in batch_of(state, line["step"]).groups:
            body = from_msgpack(town.desk.blobs.get(member.submission), t.Submission).groups[member.index]
            rewards[from_msgpack(body, t.Group).env] += member.rewards
        for label, found in rewards.items():
            expected = pytest.approx(np.mean(found)) if found else None
            assert line[f"reward_mean/{label}"] == expected
        assert line["reward_mean"] == pytest.approx(np.mean(rewards["easy"] + rewards["hard"]))


@pytest.mark.parametrize("seed", first_of(1, 2))
def test_a_lying_network_changes_nothing(tmp_path, single_file_weights, seed):
    town = Town(tmp_path / "run", tiny_run(), fault_rate=0.2, seed=seed)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0"), town.worker("worker-1")))
    assert town.weights() == single_file_weights
    assert town.audit().findings == []


@pytest.mark.parametrize("cheat", first_of(*CHEATS))
def test_a_cheating_worker_earns_nothing_and_changes_nothing(tmp_path, single_file_weights, cheat):
    town = Town(tmp_path / "run", tiny_run())
    cheater, honest = town.worker("cheater", cheat), town.worker("honest")
    asyncio.run(town.live(town.trainer(), town.validator(), cheater, honest))
    state = town.desk.state
    assert state.members[honest.key].credits > 0 and state.members[honest.key].refused == 0
    if cheat != "old-weights":  # its work on version 0 is honest, because no older version exists
        assert state.members[cheater.key].credits == 0
        assert state.members[cheater.key].refused > 0
    assert town.weights() == single_file_weights


class ComesWhenCalled:
    """A worker that joins once the run says that it waits for others."""

    def __init__(self, town, worker):
        self.town, self.worker, self.heard = town, worker, ""

    async def run(self):
        while not self.heard:
            await asyncio.sleep(0.05)
            waiting_for = StatusBoard(self.town.desk).status().waiting_for
            self.heard = waiting_for if waiting_for.startswith("other workers") else ""
        assert self.town.desk.state.main.batches == {}, "one worker alone fills no batch"
        await self.worker.run()


def test_a_run_that_lacks_other_workers_says_so_and_goes_on_when_one_comes(tmp_path):
    # A block has two groups and a batch four, of which one worker may fill two. Of 8 rollouts, 3 tokens each are paid.
    rollouts = {"max_staleness": 1, "batch_groups": 4, "paid_tokens": 3}
    town = Town(tmp_path / "run", tiny_run(rollouts=rollouts, verify={"worker_share": 0.5}, steps=2))
    first, second = town.worker("first"), ComesWhenCalled(town, town.worker("second"))
    asyncio.run(town.live(town.trainer(), town.validator(), first, second))
    assert second.heard.startswith("other workers: 2 of 4 groups for the next step, and ")
    assert "verify.worker_share" in second.heard
    state = town.desk.state
    for members in state.main.batches.values():
        assert [state.maker_of(state.main, place) for place in members].count(first.key) == 2
    slots = {(version, slot): kept for version, v in state.main.versions.items() for slot, kept in v.slots.items()}
    made = [
        kept.tokens
        for place, kept in slots.items()
        if kept.submission and state.maker_of(state.main, place) == first.key
    ]
    assert max(made) > 3 * 8 and state.members[first.key].credits == sum(min(tokens, 3 * 8) for tokens in made)
    assert town.audit().findings == []


def test_an_asynchronous_run_ends_with_bounded_staleness_and_its_metrics(tmp_path):
    config = tiny_run(rollouts={"max_staleness": 1}, steps=4)
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0"), town.worker("worker-1")))
    lines = read_metrics(town.folder.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(set(line["staleness_rollouts"]) <= {"0", "1"} for line in lines)
    assert lines[0]["selfcheck_gap_nats"] < 1e-3
    assert town.audit().findings == []


class StopsAt:
    """A trainer that is told to stop once a version is published, and one that takes its place."""

    def __init__(self, town, version):
        self.town, self.version = town, version

    async def run(self):
        first = self.town.trainer()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(first.run())
            while self.town.desk.state.main.version < self.version:
                await asyncio.sleep(0.02)
            first.stopping.set()
            await running
        await self.town.trainer().run()


def test_mean_reward_of_a_step_is_that_of_its_own_groups_through_a_restart(tmp_path):
    town = Town(tmp_path / "run", tiny_run(rollouts={"max_staleness": 1}, steps=4))
    asyncio.run(town.live(StopsAt(town, 2), town.validator(), town.worker("worker-0")))
    expected, since = [], []
    for entry in town.audit().entries:
        match entry.body:
            case GroupAccepted(rewards=rewards):
                since.append(rewards)
            case BatchFormed():
                flat = sum(len(set(rewards)) == 1 for rewards in since)
                expected.append((np.mean(since), flat / len(since)))
                since = []
    lines = read_metrics(town.folder.metrics)
    found = [(line["reward_all_mean"], line["zero_signal_share"]) for line in lines]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and found == [pytest.approx(pair) for pair in expected]


def test_a_run_that_declares_int8_actors_accepts_them_and_nobody_else(tmp_path):
    """The policy is published in float32; workers sample it with its matrices rounded, and say so."""
    town = Town(tmp_path / "run", tiny_run(sampling={"dtype": "int8"}, steps=2))
    as_float32 = town.worker("float32")
    as_float32.node.make_engine = lambda dtype: LocalEngine(threads=1, dtype="float32")
    honest = town.worker("int8")

    async def story():
        with pytest.raises(PeerError, match="samples in int8, the worker offers float32"):
            await as_float32.run()
        await town.live(town.trainer(), town.validator(), honest)

    asyncio.run(story())
    node = town.desk.state.members[honest.key]
    assert node.credits > 0 and node.refused == 0
    assert as_float32.key not in town.desk.state.members


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
    lapses = [entry.body for entry in town.audit().entries if isinstance(entry.body, LeaseLapsed)]
    assert {lapse.cause for lapse in lapses} <= {"returned"}  # only the lease that was requested ahead


@pytest.mark.parametrize("role", ["worker", "validator"])
def test_who_is_told_to_stop_does_not_wait_for_a_version_that_takes_long(tmp_path, monkeypatch, role):
    town = Town(tmp_path / "run", tiny_run())
    monkeypatch.setattr(engine_loader, "LOAD_GRACE_S", 0.2)
    load = Session.load

    async def story():
        leaver = town.worker("leaver") if role == "worker" else town.validator()
        others = [town.trainer(), *([] if role == "worker" else [town.worker("player")])]
        begun = asyncio.Event()

        async def fetches_for_ever(seat, *arguments, **named):
            if seat.client is leaver.client:
                begun.set()
                await asyncio.sleep(3600)
            await load(seat, *arguments, **named)

        monkeypatch.setattr(Session, "load", fetches_for_ever)
        tasks = [asyncio.create_task(work) for work in (*(one.run() for one in others), town._tick())]
        leaving = asyncio.create_task(leaver.run())
        await asyncio.wait_for(begun.wait(), 30.0)
        leaver.stopping.set()
        await asyncio.wait_for(leaving, 10.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(story())
    if role == "worker":
        lapses = [entry.body.cause for entry in town.audit().entries if isinstance(entry.body, LeaseLapsed)]
        assert lapses and {*lapses} == {"returned"}


def test_a_drained_run_ends_for_everybody_at_once(tmp_path):
    """Also for a worker that was killed and comes back: it gets its lease again at once, not after the deadline."""
    town = Town(tmp_path / "run", tiny_run(steps=50, rollouts={"lease_s": 3600.0}))
    ended_at = left_at = 0.0

    async def story():
        nonlocal ended_at, left_at
        async with asyncio.TaskGroup() as group:
            roles = [group.create_task(role.run()) for role in (town.trainer(), town.validator())]
            worker = town.worker("worker")
            killed = asyncio.create_task(worker.run())
            # Wait until it plays: a fetch goes on in its thread, and writes to the folder that the next worker uses.
            leases = town.desk.state.leases
            while not hasattr(worker, "session") or not any(
                leases[i].version == worker.session.engine.version >= 1 for i in town.desk.state.open_leases
            ):
                await asyncio.sleep(0.01)
            killed.cancel()
            await asyncio.gather(killed, return_exceptions=True)
            assert town.desk.state.open_leases
            await town.desk.book.submit(Admin("drain", "", town.desk.clock()))
            while town.desk.state.pending or town.desk.state.main.version in town.desk.state.main.batches:
                await asyncio.sleep(0.01)
            waiting_for = StatusBoard(town.desk).status().waiting_for
            assert re.fullmatch(r"workers: (1 lease|2 leases) to finish, then the run ends", waiting_for), waiting_for
            roles.append(group.create_task(town.worker("worker").run()))
            async with asyncio.timeout(60.0):
                while town.desk.state.phase != "ended":
                    await asyncio.sleep(0.01)
                ended_at = time.monotonic()
                await asyncio.wait(roles)
                left_at = time.monotonic()

    asyncio.run(story())
    assert left_at - ended_at < 5.0, "a long poll is 20 s: nobody sits it out"
    assert town.weights() and town.audit().findings == []


def test_a_stranger_that_fills_no_lease_gets_few_of_them_and_changes_nothing(tmp_path, single_file_weights):
    town = Town(tmp_path / "run", tiny_run(rollouts={"lease_s": 1.0}))
    honest, stranger = town.worker("honest"), town.client(tmp_path / "stranger.key")

    async def take():
        info = await stranger.get_json("/v1/run", t.RunInfo)
        stranger.run = info.run
        await stranger.post_json("/v1/nodes", t.Join("worker", "x", 0.0, "i", "float32", "cpu"), t.NodeState)
        while True:
            held = tuple(lease.id for lease in town.desk.state.open_leases_of(stranger.key.public))
            await stranger.post_json("/v1/leases", t.LeaseRequest(held), t.LeaseAnswer)
            await asyncio.sleep(0.02)

    async def story():
        async with asyncio.TaskGroup() as group:
            taker = group.create_task(take())
            await town.live(town.trainer(), town.validator(), honest)
            taker.cancel()

    asyncio.run(story())
    audit = town.audit()
    node = audit.state.members[stranger.key.public]
    assert audit.findings == [] and town.weights() == single_file_weights
    assert 1 <= node.leases <= 5 and audit.state.members[honest.key].refused == 0


THREE_LABELS = [
    {"name": "arithmetic", "label": "sums", "args": {"digits": 1, "num_tasks": 3}, "solved": 0.1},
    {"name": "arithmetic", "label": "small", "args": {"digits": 1, "num_tasks": 5, "operations": "*"}, "solved": 0.1},
    {"name": "arithmetic", "label": "large", "args": {"digits": 4, "num_tasks": 1000}},
]
"""Of the first two, any number counts as solved, because this policy hardly ever finds the right one."""

FOLLOWING = {"curriculum": True, "window_groups": 4, "pools": True, "easy": 0.1, "hard": 0.05, "retire_after": 1}


@pytest.mark.parametrize("num_workers", first_of(3, 1))
def test_draws_that_follow_solve_rates_give_the_bytes_of_one_file(tmp_path, num_workers):
    config = tiny_run(envs=THREE_LABELS, steps=4, difficulty=FOLLOWING)
    town = Town(tmp_path / "run", config)
    workers = [town.worker(f"worker-{i}") for i in range(num_workers)]
    asyncio.run(town.live(town.trainer(), town.validator(), *workers))
    audit = town.audit()
    assert audit.findings == [] and all(town.desk.state.members[worker.key].refused == 0 for worker in workers)
    changes = [entry.body for entry in audit.entries if isinstance(entry.body, PoolsChanged)]
    assert [change.version for change in changes] == [1, 2, 3], "the last version has no slots"
    assert any(change.weights for change in changes) and any(change.moved for change in changes)
    drawn = town.desk.state.main.solved
    assert {pool for record in drawn.values() for pool in record.pools.values()} == {"easy", "hard"}
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")

"""Whole runs with the real roles over an in-memory network: what holds whichever nodes take part."""

import asyncio
import re
import time
from collections import Counter

import numpy as np
import pytest

from shoal.config import TinyPolicy
from shoal.engine.dishonest import CHEATS
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.commands import Admin
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.status import batch_of
from shoal.models.random_model import make_tiny
from shoal.protocol import messages as t
from shoal.protocol.encoding import from_msgpack
from shoal.protocol.messages import AdminRequest
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.node.session import Session
from shoal.step_metrics import read_metrics
from shoal.weights import engine_loader
from tests.envs import musing, pile
from tests.nightly import first_of
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file


@pytest.fixture(scope="module")
def single_file_weights(tmp_path_factory):
    return weights_of_one_file(tiny_run(), tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize("num_workers", first_of(3, 1))
def test_any_number_of_workers_gives_the_bytes_of_one_file(tmp_path, single_file_weights, num_workers):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    workers = [testbed.worker(f"worker-{i}") for i in range(num_workers)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    assert testbed.weights() == single_file_weights
    assert testbed.audit().findings == []


def test_rollouts_with_several_rows_give_the_bytes_of_one_file(tmp_path):
    """Two seats of one policy, and histories that leave out thoughts; with proofs of activations."""
    policy = tmp_path / "policy"
    make_tiny(TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, max_positions=96), policy, 5, "float32")
    envs = [{"name": module.__file__} for module in (pile, musing)]
    config = tiny_run(
        envs=envs, steps=2, policy={"path": str(musing.with_template(policy))}, verify={"proofs": "toploc"},
        sampling={"max_turn_tokens": 6, "max_tokens": 96, "max_rollout_tokens": 240}, storage={"retain": "all"},
    )  # fmt: skip
    testbed = RunTestbed(tmp_path / "run", config)
    workers = [testbed.worker(f"worker-{i}") for i in range(2)]
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), *workers))
    assert testbed.audit().findings == []
    assert all(testbed.coordinator.state.members[worker.key].refused == 0 for worker in workers)
    rows = Counter()
    for name in testbed.coordinator.state.submissions:
        for data in from_msgpack(testbed.coordinator.blobs.get(name), t.Submission).groups:
            group = from_msgpack(data, t.Group)
            rows[group.env] = max(rows[group.env], *(len(rollout.rows()) for rollout in group.rollouts))
    assert rows == {"pile": 2, "musing": 3}
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")


TWO_OF_ONE_NAME = [
    {"name": "arithmetic", "label": "easy", "args": {"digits": 1}},
    {"name": "arithmetic", "label": "hard", "args": {"digits": 4, "num_tasks": 1000}},
]


def test_two_environments_of_one_name_have_their_own_arguments_and_rewards(tmp_path):
    config = tiny_run(envs=TWO_OF_ONE_NAME, steps=2, storage={"retain": "all"})
    testbed = RunTestbed(tmp_path / "run", config)
    worker = testbed.worker("worker-0")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    assert testbed.coordinator.state.members[worker.key].refused == 0 and testbed.audit().findings == []
    digits = {"easy": Counter(), "hard": Counter()}
    for name, submission in testbed.coordinator.state.submissions.items():
        assert submission.decided
        for data in from_msgpack(testbed.coordinator.blobs.get(name), t.Submission).groups:
            group = from_msgpack(data, t.Group)
            env = worker.session.envs[group.env]
            opening = env.reset(env.task(group.task))[1][0]["content"]
            digits[group.env][max(map(len, re.findall(r"\d+", opening)))] += 1
    assert set(digits["easy"]) == {1} and 4 in digits["hard"]
    for line in read_metrics(testbed.folder.metrics):
        rewards = {"easy": [], "hard": []}
        for member in batch_of(testbed.coordinator.state, line["step"]).groups:
            body = from_msgpack(testbed.coordinator.blobs.get(member.submission), t.Submission).groups[member.index]
            rewards[from_msgpack(body, t.Group).env] += member.rewards
        for label, found in rewards.items():
            assert line[f"reward_mean/{label}"] == (pytest.approx(np.mean(found)) if found else None)
        assert line["reward_mean"] == pytest.approx(np.mean(rewards["easy"] + rewards["hard"]))
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")


@pytest.mark.parametrize("seed", first_of(1, 2))
def test_a_lying_network_changes_nothing(tmp_path, single_file_weights, seed):
    testbed = RunTestbed(tmp_path / "run", tiny_run(), fault_rate=0.2, seed=seed)
    asyncio.run(
        testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0"), testbed.worker("worker-1"))
    )
    assert testbed.weights() == single_file_weights
    assert testbed.audit().findings == []


@pytest.mark.parametrize("cheat", first_of(*CHEATS))
def test_a_cheating_worker_earns_nothing_and_changes_nothing(tmp_path, single_file_weights, cheat):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    cheater, honest = testbed.worker("cheater", cheat), testbed.worker("honest")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), cheater, honest))
    state = testbed.coordinator.state
    assert state.members[honest.key].credits > 0 and state.members[honest.key].refused == 0
    if cheat != "old-weights":  # its work on version 0 is honest, because no older version exists
        assert state.members[cheater.key].credits == 0
        assert state.members[cheater.key].refused > 0
    assert testbed.weights() == single_file_weights


class ComesWhenCalled:
    """A worker that joins once the run says that it waits for others."""

    def __init__(self, testbed, worker):
        self.testbed, self.worker, self.heard = testbed, worker, ""

    async def run(self):
        while not self.heard:
            await asyncio.sleep(0.05)
            waiting_for = StatusCache(self.testbed.coordinator).status().waiting_for
            self.heard = waiting_for if waiting_for.startswith("other workers") else ""
        assert self.testbed.coordinator.state.main.batches == {}, "one worker alone fills no batch"
        await self.worker.run()


def test_a_run_that_lacks_other_workers_says_so_and_goes_on_when_one_comes(tmp_path):
    # A block has two groups and a batch four, of which one worker may fill two. Of 8 rollouts, 3 tokens each are paid.
    rollouts = {"max_staleness": 1, "batch_groups": 4, "paid_tokens": 3}
    testbed = RunTestbed(tmp_path / "run", tiny_run(rollouts=rollouts, verify={"worker_share": 0.5}, steps=2))
    first, second = testbed.worker("first"), ComesWhenCalled(testbed, testbed.worker("second"))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), first, second))
    assert second.heard.startswith("other workers: 2 of 4 groups for the next step, and ")
    assert "verify.worker_share" in second.heard
    state = testbed.coordinator.state
    for members in state.main.batches.values():
        assert [state.maker_of(state.main, place) for place in members].count(first.key) == 2
    slots = {(version, slot): kept for version, v in state.main.versions.items() for slot, kept in v.slots.items()}
    made = [
        kept.tokens
        for place, kept in slots.items()
        if kept.submission and state.maker_of(state.main, place) == first.key
    ]
    assert max(made) > 3 * 8 and state.members[first.key].credits == sum(min(tokens, 3 * 8) for tokens in made)
    assert testbed.audit().findings == []


class StopsAt:
    """A trainer that is told to stop once a version is published, and one that takes its place."""

    def __init__(self, testbed, version):
        self.testbed, self.version = testbed, version

    async def run(self):
        first = self.testbed.trainer()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(first.run())
            while self.testbed.coordinator.state.main.version < self.version:
                await asyncio.sleep(0.02)
            first.stopping.set()
            await running
        await self.testbed.trainer().run()


def test_mean_reward_of_a_step_is_that_of_its_own_groups_through_a_restart(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(rollouts={"max_staleness": 1}, steps=4))
    asyncio.run(testbed.live(StopsAt(testbed, 2), testbed.validator(), testbed.worker("worker-0")))
    audit, expected, since = testbed.audit(), [], []
    assert audit.findings == []
    for entry in audit.entries:
        match entry.body:
            case GroupAccepted(rewards=rewards):
                since.append(rewards)
            case BatchFormed():
                flat = sum(len(set(rewards)) == 1 for rewards in since)
                expected.append((np.mean(since), flat / len(since)))
                since = []
    lines = read_metrics(testbed.folder.metrics)
    found = [(line["reward_all_mean"], line["zero_signal_share"]) for line in lines]
    assert all(set(line["staleness_rollouts"]) <= {"0", "1"} for line in lines)
    assert lines[0]["selfcheck_gap_nats"] < 1e-3
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and found == [pytest.approx(pair) for pair in expected]


def test_a_run_that_declares_int8_actors_accepts_them(tmp_path):
    """The policy is published in float32; workers sample it with its matrices rounded, and say so."""
    testbed = RunTestbed(tmp_path / "run", tiny_run(sampling={"dtype": "int8"}, steps=2))
    honest = testbed.worker("int8")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), honest))
    node = testbed.coordinator.state.members[honest.key]
    assert node.credits > 0 and node.refused == 0


@pytest.mark.parametrize("role", ["worker", "validator"])
def test_who_is_told_to_stop_does_not_wait_for_a_version_that_takes_long(tmp_path, monkeypatch, role):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    monkeypatch.setattr(engine_loader, "LOAD_GRACE_S", 0.2)
    load = Session.load

    async def scenario():
        leaver = testbed.worker("leaver") if role == "worker" else testbed.validator()
        others = [testbed.trainer(), *([] if role == "worker" else [testbed.worker("player")])]
        begun = asyncio.Event()

        async def fetches_for_ever(seat, *arguments, **named):
            if seat.client is leaver.client:
                begun.set()
                await asyncio.sleep(3600)
            await load(seat, *arguments, **named)

        monkeypatch.setattr(Session, "load", fetches_for_ever)
        tasks = [asyncio.create_task(work) for work in (*(one.run() for one in others), testbed._tick())]
        leaving = asyncio.create_task(leaver.run())
        await asyncio.wait_for(begun.wait(), 30.0)
        leaver.stopping.set()
        await asyncio.wait_for(leaving, 10.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    if role == "worker":
        lapses = [entry.body.cause for entry in testbed.audit().entries if isinstance(entry.body, LeaseLapsed)]
        assert lapses and {*lapses} == {"returned"}


def test_a_drained_run_ends_for_everybody_at_once(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=50, rollouts={"lease_s": 3600.0}))
    ended_at = left_at = 0.0

    async def scenario():
        nonlocal ended_at, left_at
        async with asyncio.TaskGroup() as group:
            roles = [group.create_task(role.run()) for role in (testbed.trainer(), testbed.validator())]
            roles.append(group.create_task(testbed.worker("worker").run()))
            while testbed.coordinator.state.main.version < 1 or not testbed.coordinator.state.open_leases:
                await asyncio.sleep(0.01)
            await testbed.coordinator.log_writer.submit(Admin("drain", AdminRequest(), testbed.coordinator.clock()))
            async with asyncio.timeout(60.0):
                while testbed.coordinator.state.phase != "ended":
                    await asyncio.sleep(0.01)
                ended_at = time.monotonic()
                await asyncio.wait(roles)
                left_at = time.monotonic()

    asyncio.run(scenario())
    assert left_at - ended_at < 5.0, "a long poll is 20 s: nobody sits it out"
    assert testbed.weights() and testbed.audit().findings == []

"""Environments that hang, die or exit while workers and validators play: nobody is blamed, and nothing else is learned."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.envs.isolated.connection import EnvProcessExited
from shoal.ledger.batches import SlotVoid
from shoal.ledger.leases import LeaseLapsed
from shoal.verification.verify import STOPPED
from tests.roles.testbed import RunTestbed, tiny_run

SOURCE = """
import contextlib, os, time
from pathlib import Path
from shoal.env import Env, Step


class Stops(Env):
    name, num_tasks = "stops", 12

    def __init__(self, folder, deaths, how):
        self.folder, self.deaths, self.how = Path(folder), deaths, how

    def task(self, index, heldout=False):
        return index

    def reset(self, task):
        return (task, ""), [{"role": "user", "content": str(task)}]

    def step(self, state, action):
        chosen, played = self.folder / "chosen", f"{state[0]} {action}"  # the first turn: rollouts of one task play at once
        with contextlib.suppress(FileExistsError), chosen.open("x") as file:
            file.write(played)
        if chosen.read_text() == played and (before := len(list(self.folder.iterdir())) - 1) < self.deaths:
            (self.folder / str(before)).write_text(str(os.getpid()))
            {"dies": lambda: os.kill(os.getpid(), 9), "hangs": lambda: time.sleep(60)}[self.how]()
        if state[0] < 2 and self.how == "exits":
            raise SystemExit("no more")
        return Step((state[0], str(action)), None, True)

    def score(self, state):
        return float(len(state[1]) % 2)


def environment(folder, deaths=0, how="dies"):
    return Stops(folder, deaths, how)
"""


def testbed_of(folder: Path, deaths: int, how: str = "dies", **changes: Any) -> RunTestbed:
    """A run of one or two steps on the environment above, which dies so often in all processes together."""
    (folder / "deaths").mkdir(parents=True)
    path = folder.parent / "stops.py"
    path.write_text(SOURCE)
    args = {"folder": str(folder / "deaths"), "deaths": deaths, "how": how}
    sizes = {"group_size": 4, "block_rollouts": 8, "batch_groups": 6, "lease_s": 5.0}
    tree = {"steps": 1, "envs": [{"name": str(path), "label": "stops", "args": args}], "rollouts": sizes} | changes
    return RunTestbed(folder / "run", tiny_run(**tree))


def lapses(testbed: RunTestbed) -> list[str]:
    return [entry.body.cause for entry in testbed.audit().entries if isinstance(entry.body, LeaseLapsed)]


def nobody_is_blamed(testbed: RunTestbed) -> bool:
    members = testbed.coordinator.state.members.values()
    return testbed.audit().findings == [] and all(m.refused == m.failures == 0 for m in members)


def test_a_dead_environment_is_a_lapse_and_the_same_block_gives_the_same_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes die, so one worker gives the block back. Stalling a chosen group changes nothing that is learned. The
    worker says at the first death, and the host once the block is back, which call it was."""
    weights = []
    for name, deaths in (("whole", 0), ("stopped", 2)):
        testbed = testbed_of(tmp_path / name, deaths)
        asyncio.run(testbed.live(testbed.worker("one"), testbed.worker("two"), testbed.validator(), testbed.trainer()))
        assert lapses(testbed) == ["stopped"] * (deaths // 2) and nobody_is_blamed(testbed)
        assert sum(member.lapsed for member in testbed.coordinator.state.members.values()) == deaths // 2, "at its cost"
        weights.append(testbed.weights())
    assert weights[0] == weights[1]
    why = r"step\(\) or score\(\) of task \d+: its process was ended: it was ended by signal 9 \(SIGKILL\)"
    assert re.search(rf"WARNING +envs:.* stops: {why}.*one more try", caplog.text)
    (told,) = [line for line in caplog.text.splitlines() if "an environment was stopped" in line]
    assert re.search(
        rf"stopped: worker \"(one|two)\" \([0-9a-f]+\) says \"stops: {why}.*, in task \d+ of stops and 1 more", told
    )


@pytest.mark.slow
def test_at_staleness_0_a_run_of_one_worker_whose_environment_stops_waits_for_its_host(tmp_path: Path) -> None:
    testbed = testbed_of(tmp_path / "run", 1000, rollouts={"group_size": 4, "block_rollouts": 8, "lease_s": 5.0})

    async def live() -> None:
        living = asyncio.create_task(testbed.live(testbed.worker("one"), testbed.validator(), testbed.trainer()))
        while not hasattr(testbed, "coordinator") or testbed.coordinator.state.phase != "paused":
            await asyncio.sleep(0.05)
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)

    asyncio.run(asyncio.wait_for(live(), 120))
    assert re.match(
        r"environment faults: a call .*, in task \d+ of stops and 1 more, and no", testbed.coordinator.state.pause_cause
    )
    assert lapses(testbed)[:4] == ["stopped"] * 4 and nobody_is_blamed(testbed)


@pytest.mark.slow
def test_a_block_that_stops_wherever_it_is_played_is_void_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"group_size": 4, "block_rollouts": 8, "batch_groups": 2, "lease_s": 5.0, "max_staleness": 1}
    testbed = testbed_of(tmp_path / "run", 1000, rollouts=sizes)
    worker = testbed.worker("one")
    asyncio.run(testbed.live(worker, testbed.validator(), testbed.trainer()))
    voids = [entry.body for entry in testbed.audit().entries if isinstance(entry.body, SlotVoid)]
    assert {void.cause for void in voids} == {"stopped"} and nobody_is_blamed(testbed)
    assert (
        len(lapses(testbed)) >= testbed.coordinator.state.law.block_workers == 4
        and testbed.coordinator.state.phase == "ended"
    )
    assert re.search(r'void slots: worker "one" .* says "stops: .*SIGKILL.*; task \d+ of stops and 1 more', caplog.text)


def test_a_validator_whose_environment_dies_accuses_nobody(tmp_path: Path) -> None:
    """The environment lives while the worker plays, and dies from then on."""
    sizes = {"group_size": 4, "block_rollouts": 8, "batch_groups": 2, "lease_s": 5.0}
    testbed = testbed_of(tmp_path / "run", 0, rollouts=sizes)
    validator = testbed.validator()

    async def kill() -> None:
        while not hasattr(validator, "session"):
            await asyncio.sleep(0.01)
        env: Any = validator.session.envs["stops"]
        ask = env.pool._answer

        def dead(process: Any, job: Any, patience: float) -> Any:
            if job.states and job.states[0].task.number < 6:
                raise EnvProcessExited("was ended")
            return ask(process, job, patience)

        env.pool._answer, env.pool._together = dead, lambda queue: [queue.popleft()] if queue else []

    async def live() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            await testbed.live(testbed.worker("one"), validator, testbed.trainer())

    asyncio.run(live())
    assert nobody_is_blamed(testbed)
    voids = [entry.body for entry in testbed.audit().entries if isinstance(entry.body, SlotVoid)]
    assert voids and all(void.cause == f"replay: {STOPPED}" for void in voids)


def test_an_exit_ends_its_rollout_and_no_role(tmp_path: Path) -> None:
    testbed = testbed_of(
        tmp_path / "run", 0, "exits", rollouts={"group_size": 4, "block_rollouts": 8, "batch_groups": 2}
    )
    worker = testbed.worker("one")
    worker.clock = lambda: time.time() - 50  # clocks differ
    asyncio.run(testbed.live(worker, testbed.validator(), testbed.trainer()))
    assert nobody_is_blamed(testbed) and lapses(testbed) == []
    assert abs(worker.due - time.monotonic()) < 30, "counted from when the lease came"


def test_who_is_told_to_stop_leaves_a_hanging_step_at_once(tmp_path: Path) -> None:
    testbed = testbed_of(tmp_path / "run", 1000, "hangs")
    worker = testbed.worker("one")

    async def live() -> float:
        working = asyncio.create_task(worker.run())
        validating, training = (
            asyncio.create_task(testbed.validator().run()),
            asyncio.create_task(testbed.trainer().run()),
        )
        while len(list((tmp_path / "run" / "deaths").iterdir())) < 2:
            await asyncio.sleep(0.05)
        began = time.monotonic()
        worker.stopping.set()
        await working
        for other in (validating, training):
            other.cancel()
        return time.monotonic() - began

    assert asyncio.run(live()) < 6
    assert {*lapses(testbed)} == {"returned"}

"""Slow judges and slow turns at the stage: each is asked once, and those of one worker hold up no other."""

import asyncio
import threading
import time

import pytest

from shoal.net.server import RequestRefused
from shoal.protocol import messages as t
from shoal.roles.coordinator import env_server_client
from shoal.roles.env_server import server
from shoal.roles.env_server import server as stage_role
from shoal.roles.env_server.server import InFlight
from tests.envs import rivals
from tests.roles.test_turns import World

COMPARED = [{"name": rivals.__file__, "kind": "completions"}]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A stage with places for four turns, of which a worker may take two."""
    monkeypatch.setattr(stage_role, "MAX_TURNS", 4)
    monkeypatch.setattr(stage_role, "MAX_WORKER_TURNS", 2)
    world = World(tmp_path / "run", COMPARED)
    yield world
    world.testbed.stage.close()


def test_a_judge_that_takes_longer_than_an_answer_is_asked_once(world, monkeypatch):
    """The judge of a group may take minutes. The worker sends its submission again and again meanwhile."""
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    monkeypatch.setattr(env_server_client, "STAGE_S", 0.1)
    judged, asked = [], []

    async def scenario():
        body = await world.play()
        players = await world.testbed.stage._open()
        judge, players.judge = players.judge, lambda slot, paths: slow(judge, slot, paths)
        record = world.coordinator.stage.record
        monkeypatch.setattr(world.coordinator.stage, "record", lambda staged: asked.append(staged) or record(staged))
        return await world.submit(body)

    def slow(judge, slot, paths):
        judged.append(slot.slot)
        time.sleep(0.5)
        return judge(slot, paths)

    receipt = asyncio.run(scenario())
    assert world.coordinator.state.submissions[receipt.digest].record
    assert judged == [slot.slot for slot in world.block.slots] and len(asked) > 2


def test_slow_turns_of_one_worker_leave_places_for_others(world, monkeypatch):
    """A worker asks for more and more turns that take long. The coordinator forgets those that must ask again."""
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    go_on = threading.Event()

    def slow(number: int):
        turn = t.EnvTurn(world.block.index, 0)
        return world.testbed.stage._answer(t.Staged(f"slow-{number}", 0, (world.block,), turn, world.keys[0]), turn)

    async def scenario():
        players = await world.testbed.stage._open()
        play, players.play = players.play, lambda asks: go_on.wait(60) and play(asks)
        flood = await asyncio.gather(*map(slow, range(20)), return_exceptions=True)
        players.play = play
        try:
            return flood, await world.turn(0, which=1, deadline_s=30.0)
        finally:
            go_on.set()

    flood, honest = asyncio.run(scenario())
    assert len(honest.said) == 16
    assert sum("limit 2" in str(told) for told in flood) == 18


def test_a_worker_that_asks_no_more_than_it_may_is_never_refused():
    """Sixteen blocks at a time, and the next as soon as one of them is done."""

    async def scenario():
        work: InFlight[int] = InFlight("turn", 32, 16)
        places = asyncio.Semaphore(16)

        async def block(number: int) -> int:
            async with places:
                return sum([await work.answer("honest", (number,), str(turn), lambda: number) for turn in range(3)])

        done = await asyncio.gather(*(block(number) for number in range(200)))
        work.close()
        return done, work._tasks, work._of

    done, tasks, of = asyncio.run(scenario())
    assert done == [3 * number for number in range(200)] and not tasks and not of


def test_work_that_failed_while_nobody_waited_is_done_again(monkeypatch):
    monkeypatch.setattr(server, "ANSWER_S", 0.01)
    calls = []

    def fails_once():
        calls.append(1)
        time.sleep(0.1)
        if len(calls) == 1:
            raise OSError("the first time")
        return "done"

    async def scenario():
        work: InFlight[str] = InFlight("record", 4, 4)
        while True:
            try:
                return await work.answer("worker", (1,), "", fails_once)
            except RequestRefused:
                while work._tasks and len(calls) == 1:
                    await asyncio.sleep(0.01)

    assert asyncio.run(scenario()) == "done" and len(calls) == 2

"""A process has its device until another waits, and what it keeps there is away in between."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.roles.node import device_queue
from shoal.roles.node.device_queue import Queue, SharedDevice, Shift, shift_of


class Weights:
    """What a process keeps, and how often it was moved."""

    def __init__(self) -> None:
        self.here, self.moves = True, 0

    def park(self) -> None:
        self.here, self.moves = False, self.moves + 1

    def come_back(self) -> None:
        self.here = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "POLL_S", 0.002)


def process(folder: Path, name: str) -> tuple[SharedDevice, Weights]:
    shift, weights = SharedDevice(Queue(folder, name)), Weights()
    shift.keeps(weights)
    return shift, weights


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_one_without_work_makes_room_as_soon_as_another_waits(tmp_path: Path) -> None:
    """Else a trainer that waits for a batch would keep out the worker that makes it."""
    (trainer, its), (worker, theirs) = process(tmp_path, "trainer"), process(tmp_path, "worker")
    with trainer.held():
        pass
    with worker.held():
        assert theirs.here and not its.here
    with trainer.held():
        assert its.here and not theirs.here


def test_one_with_much_work_is_followed_by_those_who_wait(tmp_path: Path) -> None:
    """It asks again at once, and does not come first."""
    order: list[str] = []
    made = {name: process(tmp_path, name)[0] for name in ("a", "b", "c")}

    def work(name: str) -> None:
        for _ in range(20):
            with made[name].held():
                order.append(name)
                time.sleep(0.001)
                assert order[-1] == name, "two were at work"

    threads = [threading.Thread(target=work, args=(name,)) for name in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(order) == 60
    middle = order[9:40]  # while all three have work
    assert all(set(middle[i : i + 4]) == {"a", "b", "c"} for i in range(len(middle) - 4)), order


def test_a_pause_lets_others_go_first(tmp_path: Path) -> None:
    (evaluation, its), (trainer, _) = process(tmp_path, "evaluation"), process(tmp_path, "trainer")
    order: list[str] = []

    def step() -> None:
        with trainer.held():
            order.append("step")

    with evaluation.held():
        evaluation.pause()  # nobody waits
        assert not its.moves
        order.append("part")
        thread = threading.Thread(target=step)
        thread.start()
        until(lambda: trainer._asked is not None)
        evaluation.pause()
        assert its.here and its.moves == 1
        order.append("part")
    thread.join(10)
    assert order == ["part", "step", "part"]


def test_a_pause_that_cannot_come_back_ends_its_work_once(tmp_path: Path) -> None:
    (evaluation, its), (trainer, _) = process(tmp_path, "evaluation"), process(tmp_path, "trainer")

    def full() -> None:
        raise MemoryError

    def step() -> None:
        with trainer.held():
            pass

    with pytest.raises(MemoryError), evaluation.held():
        its.come_back = full
        thread = threading.Thread(target=step)
        thread.start()
        until(lambda: trainer._asked is not None)
        evaluation.pause()
    thread.join(10)
    assert evaluation._works == 0


def test_works_of_one_process_share_its_shift_but_not_while_others_wait(tmp_path: Path) -> None:
    """A worker begins a lease before the last one has ended: without end, if it may."""

    async def scenario() -> list[str]:
        (worker, _), (trainer, _) = process(tmp_path, "worker"), process(tmp_path, "trainer")
        order: list[str] = []

        async def play(name: str, goes_on: asyncio.Event) -> None:
            async with worker.on():
                order.append(name)
                await goes_on.wait()

        async def step() -> None:
            async with trainer.on():
                order.append("step")

        ends = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(play(str(i), ends[i])) for i in range(2)]
        while len(order) < 2:
            await asyncio.sleep(0.002)
        tasks.append(asyncio.create_task(step()))
        while trainer._asked is None:
            await asyncio.sleep(0.002)
        tasks.append(asyncio.create_task(play("2", ends[2])))
        ends[0].set()
        await asyncio.sleep(0.05)
        assert sorted(order) == ["0", "1"]
        ends[1].set()
        ends[2].set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario())[2:] == ["step", "2"]


def test_who_is_told_to_stop_waits_no_longer(tmp_path: Path) -> None:
    async def scenario() -> None:
        (trainer, _), (worker, _), (validator, _) = (process(tmp_path, name) for name in ("t", "w", "v"))

        async def work() -> None:
            async with worker.on():
                raise AssertionError("it was cancelled before its shift")

        async with trainer.on():
            task = asyncio.create_task(work())
            while worker._asked is None:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not worker._queue.is_in
        async with validator.on():
            pass

    asyncio.run(scenario())


def test_a_shift_that_began_for_a_cancelled_work_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        (worker, weights), (trainer, _) = process(tmp_path, "worker"), process(tmp_path, "trainer")
        coming, come = threading.Event(), threading.Event()

        def slowly() -> None:
            coming.set()
            come.wait(10)

        weights.come_back = slowly  # type: ignore[method-assign]

        async def work() -> None:
            async with worker.on():
                raise AssertionError("it was cancelled")

        task = asyncio.create_task(work())
        await asyncio.to_thread(coming.wait)
        task.cancel()
        await asyncio.sleep(0.01)
        come.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            async with trainer.on():
                pass

    asyncio.run(scenario())


def test_without_a_folder_a_process_has_its_device_to_itself() -> None:
    assert type(shift_of(None, "trainer")) is Shift

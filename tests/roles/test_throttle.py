"""What a user lets a worker take: hours, a share of the CPU, pauses; none of it costs an honest worker anything."""

import asyncio
import time
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from shoal.engine.native import LocalEngine
from shoal.errors import ConfigError
from shoal.roles.node import lease_client
from shoal.roles.node.device_queue import is_parkable
from shoal.roles.node.throttle import Allowance, BoundedEngine, Hours, cpu_time_s
from tests.envs.conftest import FakeEngine
from tests.roles.testbed import RunTestbed, tiny_run

BERLIN = ZoneInfo("Europe/Berlin")


def there(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, BERLIN)


def at(*moment: int, fold: int = 0) -> float:
    return datetime(*moment, tzinfo=BERLIN, fold=fold).timestamp()  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [("22-7", (22, 0, 6, 23), (7, 8, 21)), ("9-17", (9, 16), (8, 17, 23)), ("12-13,18-8", (12, 18, 0, 7), (8, 11, 13, 17)),
     ("0-24", (0, 12, 23), ()), ("23-24", (23,), (0, 22))],
)  # fmt: skip
def test_hours_hold_from_their_start_to_before_their_end_also_over_midnight(
    hours: str, inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    parsed = Hours.parse(hours)
    assert all(parsed.hold(datetime(2026, 6, 1, hour)) for hour in inside)
    assert not any(parsed.hold(datetime(2026, 6, 1, hour)) for hour in outside)


def test_hours_may_name_minutes() -> None:
    parsed = Hours.parse("22:30-7:15")
    held = [(22, 29, False), (22, 30, True), (7, 14, True), (7, 15, False)]
    assert all(parsed.hold(datetime(2026, 6, 1, h, m)) is expected for h, m, expected in held)


@pytest.mark.parametrize(
    "text", ["", "22", "22-22", "25-3", "3-25", "1:60-2", "a-b", "22-7;8-9", "-1-3", "0-24:30", "24-0"]
)
def test_hours_that_make_no_sense_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 22-7"):
        Hours.parse(text)


def test_hours_follow_the_clock_on_the_wall_when_it_is_put_forward_or_back() -> None:
    # In Berlin on 29 March 2026 the hour from 2 to 3 is left out; on 25 October it comes twice.
    night = Hours.parse("22-7")
    assert there(at(2026, 3, 28, 22)).hour == 22
    spring = [night.hold(there(at(2026, 3, 28, 22) + 1800 * half)) for half in range(24)]
    autumn = [night.hold(there(at(2026, 10, 24, 22) + 1800 * half)) for half in range(24)]
    assert sum(spring) == 2 * 8 and sum(autumn) == 2 * 10
    gone = Hours.parse("2-3")
    assert gone.next_start(at(2026, 3, 29, 1, 30), there) == there(at(2026, 3, 30, 2))
    assert gone.next_start(at(2026, 10, 25, 1, 30), there) == there(at(2026, 10, 25, 2))
    assert gone.next_start(at(2026, 10, 25, 3), there) == there(at(2026, 10, 26, 2))


def test_outside_its_hours_a_worker_says_when_it_works_again() -> None:
    now = [at(2026, 6, 1, 12)]
    allowance = Allowance(Hours.parse("22-7"), clock=lambda: now[0], local=there)
    assert allowance.forbids() == "outside --hours 22-7: leases are taken again at 22:00"
    now[0] = at(2026, 6, 1, 23)
    assert allowance.forbids() == ""
    early = Allowance(Hours.parse("3-4"), clock=lambda: now[0], local=there)
    assert early.forbids().endswith("at 03:00 tomorrow")
    allowance.pause()
    assert allowance.forbids().startswith("paused by you")
    allowance.toggle()
    assert allowance.forbids() == ""


class Machine:
    """A clock and a CPU that a test moves on."""

    def __init__(self) -> None:
        self.now_s, self.used_s = 0.0, 0.0

    def compute(self, seconds: float, cores: float) -> None:
        self.now_s += seconds
        self.used_s += seconds * cores

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def allowance(self, share: float, cores: int) -> Allowance:
        return Allowance(
            cpu_share=share, cores=cores, monotonic=lambda: self.now_s, sleep=self.sleep, cpu_s=lambda: self.used_s
        )


@pytest.mark.parametrize(("share", "cores", "used"), [(0.5, 4, 4.0), (0.25, 2, 1.0), (0.1, 1, 1.0), (0.5, 8, 4.0)])
def test_work_within_a_share_pauses_for_the_rest(share: float, cores: int, used: float) -> None:
    machine = Machine()
    allowance = machine.allowance(share, cores)
    for _ in range(200):
        allowance.breathe()
        machine.compute(0.5, used)
    assert machine.used_s / (machine.now_s * cores) == pytest.approx(share, rel=0.02)


def test_idle_hours_are_not_saved_up_and_a_full_share_never_pauses() -> None:
    machine = Machine()
    allowance = machine.allowance(0.5, 2)
    machine.now_s = 36_000.0
    allowance.breathe()
    began = machine.now_s
    for _ in range(100):
        allowance.breathe()
        machine.compute(1.0, 2.0)
    assert machine.used_s / ((machine.now_s - began) * 2) < 0.54
    free = machine.allowance(1.0, 2)
    now = machine.now_s
    machine.compute(9.0, 2.0)
    free.breathe()
    assert machine.now_s == now + 9.0


def test_threads_follow_the_share_of_the_cores() -> None:
    assert [Allowance(cpu_share=share, cores=8).threads() for share in (0.01, 0.25, 0.5, 0.99)] == [1, 2, 4, 7]


def test_a_bounded_engine_says_what_its_engine_says_and_is_parked_if_it_can_be() -> None:
    plain, bounded = LocalEngine(1), BoundedEngine(LocalEngine(1), Allowance(cpu_share=0.5))
    assert bounded.facts == plain.facts and bounded.version == -1 and is_parkable(bounded)
    assert not is_parkable(BoundedEngine(FakeEngine(), Allowance(cpu_share=0.5)))


def test_a_paused_worker_finishes_what_it_holds_takes_nothing_and_loses_nothing(tmp_path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(rollouts={"lease_s": 60.0}))
    worker = testbed.worker("mine")
    seen: list[tuple[int, int]] = []

    def state():
        return testbed.coordinator.state

    async def user() -> None:
        while not any(node.accepted for node in state().members.values()):
            await asyncio.sleep(0.01)
        worker.node.allowance.pause()
        while worker.leases.holding or not worker.activity.words.startswith("waiting: paused") or state().pending:
            assert state().phase != "ended", "it went on although it was paused"
            await asyncio.sleep(0.01)
        seen.append((state().members[worker.key].leases, len(state().open_leases_of(worker.key))))
        await asyncio.sleep(0.5)
        seen.append((state().members[worker.key].leases, len(state().open_leases_of(worker.key))))
        worker.node.allowance.resume()

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(user())
            await testbed.live(testbed.trainer(), testbed.validator(), worker)

    asyncio.run(scenario())
    member = state().members[worker.key]
    assert seen[0] == seen[1] and seen[0][1] == 0, "it holds nothing, and takes nothing"
    assert member.lapsed == 0 and member.unfilled == 0 and member.refused == 0 and state().phase == "ended"
    assert testbed.audit().findings == []


def test_a_worker_that_rests_learns_that_the_run_has_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lease_client, "ASK_EVERY_S", 0.0)
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    resting = testbed.worker("resting")
    resting.node.allowance.pause()
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("working"), resting, limit_s=60.0))
    assert testbed.coordinator.state.phase == "ended" and testbed.coordinator.state.members[resting.key].leases == 0


@pytest.mark.slow
def test_a_worker_with_a_tenth_of_the_cpu_is_slow_and_honest(tmp_path) -> None:
    testbed = RunTestbed(tmp_path / "run", tiny_run(rollouts={"lease_s": 60.0}))
    worker = testbed.worker("slow")
    worker.node.allowance = Allowance(cpu_share=0.1, cores=1)
    make = worker.node.make_engine
    worker.node.make_engine = lambda dtype, **named: BoundedEngine(make(dtype, **named), worker.node.allowance)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    member = testbed.coordinator.state.members[worker.key]
    assert member.accepted > 0 and member.lapsed == member.refused == member.unfilled == 0
    assert testbed.audit().findings == []


@pytest.mark.slow
def test_a_share_of_the_cpu_holds_on_a_real_clock() -> None:
    allowance = Allowance(cpu_share=0.3, cores=1)
    began, used = time.monotonic(), cpu_time_s()
    while time.monotonic() - began < 4.0:
        allowance.breathe()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
    assert (cpu_time_s() - used) / (time.monotonic() - began) < 0.36

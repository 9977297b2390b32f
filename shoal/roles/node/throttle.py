"""What its user lets a worker take of the machine: at which hours, how much of the CPU, and whether at all just now.

A worker that may not work keeps the leases that it has, fills them, and asks for no other. So nothing lapses, and to the
host it is a worker that does not ask. It knows no run and no network.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from shoal.engine.interface import Continuation, Engine, EngineRequest, PolicyScore, ScoreRequest
from shoal.errors import ConfigError
from shoal.protocol.messages import EngineFacts

log = logging.getLogger("worker")

BURST_S = 5.0
"""CPU time that was not used may be used later, up to what the share gives in so many seconds."""

NAP_S = 0.2
"""A pause for the CPU's sake looks this often whether the worker was told to stop."""

LOOK_S = 0.5
"""How often a worker that waits looks whether it may go on."""

DAY_MIN = 24 * 60


@dataclass(frozen=True)
class Hours:
    """Parts of the day, by the clock on the wall: minutes from midnight, each from its start to before its end. An end
    that is not after its start is on the next day."""

    spans: tuple[tuple[int, int], ...]
    text: str
    """As the user wrote it."""

    @staticmethod
    def parse(text: str) -> "Hours":
        """Such as "22-7", "22:30-7:15" or "12-13,18-8". Raises `ConfigError`."""
        spans = []
        for part in text.split(","):
            found = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", part.strip())
            numbers = [int(each or 0) for each in found.groups()] if found else []
            start, end = (60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]) if found else (0, 0)
            if not found or max(numbers[1], numbers[3]) > 59 or max(start, end) > DAY_MIN or start % DAY_MIN == end:
                raise ConfigError(
                    f"--hours {text[:60]!r}: write from-to in hours of this machine's time, such as 22-7, 22:30-7:15 or "
                    "12-13,18-8"
                )
            spans.append((start % DAY_MIN, end))
        return Hours(tuple(spans), text)

    def hold(self, now: datetime) -> bool:
        """Whether this moment is in them. Only the hour and minute of `now` count, so a day whose clock is put forward has
        fewer of them, and one whose clock is put back has more."""
        minute = 60 * now.hour + now.minute
        return any(a <= minute < b if a < b else minute >= a or minute < b for a, b in self.spans)

    def next_start(self, time_s: float, local: Callable[[float], datetime]) -> datetime | None:
        """When they hold next; `local` turns seconds since the epoch into the time on the wall. None if never, such as
        when their only minutes are skipped."""
        minute_s = time_s - time_s % 60
        for ahead in range(1, 2 * DAY_MIN + 120):
            moment = local(minute_s + 60 * ahead)
            if self.hold(moment):
                return moment
        return None


@dataclass
class Allowance:
    """What a worker may do. `pause` and `resume` may come from a signal or another thread."""

    hours: Hours | None = None
    cpu_share: float = 1.0
    """Of all cores of the machine, over a few seconds. 1 is no limit."""
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    clock: Callable[[], float] = time.time
    local: Callable[[float], datetime] = datetime.fromtimestamp
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    cpu_s: Callable[[], float] = field(default_factory=lambda: cpu_time_s)
    paused: bool = False

    def __post_init__(self) -> None:
        self._credit_s, self._since = 0.0, None if self.cpu_share >= 1 else (self.monotonic(), self.cpu_s())

    def pause(self) -> None:
        """Take no further lease."""
        if not self.paused:
            self.paused = True
            log.info("paused: work in hand is finished and sent, then no lease is taken until you resume")

    def resume(self) -> None:
        """Take leases again."""
        if self.paused:
            self.paused = False
            log.info("resumed: leases are taken again")

    def toggle(self) -> None:
        """Pause or resume."""
        (self.resume if self.paused else self.pause)()

    def forbids(self) -> str:
        """Why no lease may be taken now, in words; "" if one may."""
        if self.paused:
            return "paused by you: no lease is taken until you resume"
        if self.hours is None or self.hours.hold(self.local(self.clock())):  # guard: outside-its-hours
            return ""
        start = self.hours.next_start(self.clock(), self.local)
        when = f"at {start:%H:%M}" + (" tomorrow" if self._is_tomorrow(start) else "") if start else "never"
        return f"outside --hours {self.hours.text}: leases are taken again {when}"

    def _is_tomorrow(self, moment: datetime) -> bool:
        return moment.date() == self.local(self.clock()).date() + timedelta(days=1)

    def breathe(self, hurries: Callable[[], bool] = bool) -> None:
        """Called before work that takes the CPU: wait until what was computed fits the share, or the worker `hurries`.

        What is owed is waited for before the next work, never after the last: a finished lease is sent at once, and the
        wait counts for the next one's speed, so the leases of a slow worker are small.
        """
        if self._since is None:
            return
        rate = self.cpu_share * self.cores
        self._settle(rate)
        while self._credit_s < 0 and not hurries():  # guard: cpu-share
            self.sleep(min(NAP_S, 0.001 - self._credit_s / rate))  # a little more: rounding must not keep us here
            self._settle(rate)

    def _settle(self, rate: float) -> None:
        assert self._since is not None
        now, used_s = self.monotonic(), self.cpu_s()
        earned_s, spent_s = (now - self._since[0]) * rate, used_s - self._since[1]
        self._credit_s = min(BURST_S * rate, self._credit_s + earned_s - spent_s)
        self._since = (now, used_s)

    def threads(self) -> int:
        """Threads that compute, for this share of the cores: pauses do the rest."""
        return max(1, int(self.cpu_share * self.cores))


class BoundedEngine:
    """An engine that computes within an allowance. What it says is the engine's own."""

    def __init__(self, engine: Engine, allowance: Allowance, hurries: Callable[[], bool] = bool) -> None:
        """`hurries`: whether it waits no more, as a worker that was told to stop."""
        self._engine, self._allowance, self._hurries = engine, allowance, hurries

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    @property
    def version(self) -> int:
        return self._engine.version

    def load(self, directory: Path, version: int) -> None:
        self._engine.load(directory, version)

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        self._allowance.breathe(self._hurries)
        return self._engine.extend(requests, temperature)

    def forget(self, rollouts: Iterable[str]) -> None:
        self._engine.forget(rollouts)

    def score(self, requests: Sequence[ScoreRequest], temperature: float, hidden: bool = False) -> list[PolicyScore]:
        self._allowance.breathe(self._hurries)
        return self._engine.score(requests, temperature, hidden)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)  # an engine that can be parked still can


def cpu_time_s() -> float:
    """CPU time of this process, its threads and its children, including those that have ended."""
    process = psutil.Process()
    total = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:  # it has ended, and its time is among ours
            continue
    return total

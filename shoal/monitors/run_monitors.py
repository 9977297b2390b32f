"""A run followed by its monitors: the log's events and the metrics come in, changes of alarms come out.

A step is looked at when the log has the version that it made, so that a second reading of the same log and metrics comes to
the same alarms at the same steps.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.ledger.event import Entry
from shoal.monitors.alarm_state import AlarmChange, AlarmState
from shoal.monitors.inputs import HeldoutResult, Machine, MonitorInputs, around_best, in_view
from shoal.monitors.log_stats import Digest


@dataclass(frozen=True)
class MonitorConfig:
    """What of the run file the monitors need."""

    limits: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    moving_tasks: bool = False
    max_flat_groups: int = 0


class RunMonitors:
    """The monitors of one run, with what they have seen."""

    def __init__(self, setting: MonitorConfig) -> None:
        self.setting = setting
        self.digest = Digest()
        self.watch = AlarmState()
        self.announced = frozenset[str]()
        """Keys of workers that the run file itself starts to cheat."""
        self._next_step = 0

    def see(
        self, entries: Iterable[Entry], lines: Sequence[Mapping[str, Any]], heldout: Sequence[HeldoutResult] = ()
    ) -> list[AlarmChange]:
        """Take new events and all metrics so far. Returns what changed at the steps that ended."""
        changes: list[AlarmChange] = []
        numbers = [int(line["step"]) for line in lines]
        for entry in entries:
            self.digest.see(entry)
            changes += self._look_at_steps(numbers, lines, heldout)
        return changes + self._look_at_steps(numbers, lines, heldout)

    def look_between(self, machine: Machine, lines: Sequence[Mapping[str, Any]]) -> list[AlarmChange]:
        """Look at what does not wait for a step."""
        return self.watch.see(self._view(lines, len(lines), (), machine))

    def _look_at_steps(
        self, numbers: Sequence[int], lines: Sequence[Mapping[str, Any]], heldout: Sequence[HeldoutResult]
    ) -> list[AlarmChange]:
        """Look at each step whose version is published and whose metrics are there, or will never be."""
        changes: list[AlarmChange] = []
        while self._next_step < self.digest.now.step and numbers and numbers[-1] >= self._next_step:
            step, self._next_step = self._next_step, self._next_step + 1
            count = bisect_right(numbers, step)
            if count and numbers[count - 1] == step:
                changes += self.watch.see(self._view(lines, count, heldout, None))
        return changes

    def _view(
        self, lines: Sequence[Mapping[str, Any]], count: int, heldout: Sequence[HeldoutResult], machine: Machine | None
    ) -> MonitorInputs:
        known = in_view(lines, count)
        step = int(known[-1]["step"]) if known else 0
        tried = [one for one in heldout if one.version <= step + 1]
        judged = [one.judge for one in tried if one.judge is not None]
        return MonitorInputs(
            lines=known,
            steps=self.digest.done(step) if machine is None else (),
            names=self.digest.names,
            heldout=tried,
            at_best=around_best(lines[:count], tried),
            judged=judged,
            at_best_judged=around_best(lines[:count], judged),
            limits=self.setting.limits,
            dtype=self.setting.dtype,
            moving_tasks=self.setting.moving_tasks,
            max_flat_groups=self.setting.max_flat_groups,
            announced=self.announced,
            machine=machine,
            leased=() if machine is None else self.digest.longest_leased(),
        )

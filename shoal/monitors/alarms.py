"""Alarms of a run: all monitors, when their findings raise and clear an alarm, and the run that they follow.

One odd step is no alarm, and an alarm does not flicker. What is raised is a function of the log, the metrics and the looks
between steps, so a launcher that starts again comes to the same alarms.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shoal.alarms import Alarm
from shoal.ledger.event import Entry
from shoal.monitors import host, learning, nodes
from shoal.monitors.monitor_inputs import HeldoutResult, LimitExceeded, Machine, MonitorInputs, around_best, in_view
from shoal.monitors.step_statistics import Digest


class Monitor(NamedTuple):
    """A monitor, and how often it must find something."""

    look: Callable[[MonitorInputs], Iterator[LimitExceeded]]
    found: int
    """Steps with a finding that raise the alarm,"""
    of: int
    """among so many."""
    clear: int
    """Steps without a finding that clear it."""


MONITORS: dict[str, Monitor] = {
    "drift": Monitor(learning.drift, 3, 5, 8),
    "collapse": Monitor(learning.collapse, 3, 5, 10),
    "entropy": Monitor(learning.entropy, 5, 6, 10),
    "hacking": Monitor(learning.hacking, 4, 6, 10),
    "poisoning": Monitor(nodes.poisoning, 2, 3, 10),
    "stragglers": Monitor(nodes.stragglers, 3, 5, 10),
    "validators": Monitor(nodes.validators, 1, 1, 20),
    "no_signal": Monitor(learning.no_signal, 4, 6, 6),
    "clock": Monitor(nodes.clock, 2, 3, 5),
    "starved": Monitor(host.starved, 3, 5, 5),
    "publishing": Monitor(host.publishing, 5, 8, 8),
}
"""By name of the alarm: what is looked at once a step.

To add a monitor: a function in `learning`, `nodes` or `host`, whose docstring says what it cannot see; its row here or in
`BETWEEN`; its sentence and limits in `config/alarm_limits.py`; its fault in `tests/monitors/test_monitors.py`; the tables
of docs/reference/alarms.md, by `python -m tests.test_docs --write`; and the rooms' budgets in `tests/test_house.py`.
"""

BETWEEN: dict[str, Monitor] = {
    "disk": Monitor(host.disk, 2, 2, 5),
    "clock": Monitor(nodes.clock, 2, 3, 5),
    "starved": Monitor(host.starved, 3, 3, 3),
    "no_signal": Monitor(learning.no_signal, 2, 2, 3),
}
"""The same for looks between steps, a few seconds apart: what must be seen though no step ends."""


class AlarmChange(NamedTuple):
    """An alarm was raised or cleared."""

    change: Literal["raised", "cleared"]
    alarm: Alarm


@dataclass
class _SubjectState:
    """What a monitor found of one subject: the run, or a node."""

    seen: deque[bool]
    raised: Alarm | None = None
    clean: int = 0

    def update(self, monitor: Monitor, cause: str, finding: LimitExceeded | None, step: int) -> Iterator[AlarmChange]:
        """Take a finding, or that there is none; yields the change that it makes."""
        self.seen.append(finding is not None)
        self.clean = 0 if finding else self.clean + 1
        before = self.raised
        if finding is not None and (before or sum(self.seen) >= monitor.found):
            since = before.since if before else step
            self.raised = Alarm(
                cause, finding.severity, since, step, finding.summary, finding.remedy, finding.measured, finding.node
            )
            if not before:
                yield AlarmChange("raised", self.raised)
        elif before and self.clean >= monitor.clear:
            self.raised = None
            yield AlarmChange("cleared", before)


@dataclass
class _Alarms:
    """The alarms of one sort of look."""

    monitors: dict[str, Monitor]
    subjects: dict[tuple[str, str], _SubjectState] = field(default_factory=dict)

    def see(self, view: MonitorInputs) -> list[AlarmChange]:
        changes: list[AlarmChange] = []
        for cause, monitor in self.monitors.items():
            found: dict[str, LimitExceeded] = {}
            for finding in monitor.look(view):
                if finding.node not in view.announced:
                    found.setdefault(finding.node, finding)
            known = [node for known_cause, node in self.subjects if known_cause == cause]
            for node in dict.fromkeys([*known, *found]):
                state = self.subjects.setdefault((cause, node), _SubjectState(deque(maxlen=monitor.of)))
                changes += state.update(monitor, cause, found.get(node), view.step)
                if state.raised is None and not any(state.seen):
                    del self.subjects[cause, node]
        return changes

    @property
    def standing(self) -> list[Alarm]:
        return [state.raised for state in self.subjects.values() if state.raised is not None]


class AlarmState:
    """All monitors of one run, with what they found."""

    def __init__(self) -> None:
        self._of_steps, self._between = _Alarms(MONITORS), _Alarms(BETWEEN)

    def see(self, view: MonitorInputs) -> list[AlarmChange]:
        """Take a view: of a step that has ended, or between steps if it has a machine."""
        here, other = self._of_steps, self._between
        if view.machine is not None:
            here, other = other, here
        elsewhere = {alarm.subject for alarm in other.standing}
        return [change for change in here.see(view) if change.alarm.subject not in elsewhere]

    @property
    def standing(self) -> Sequence[Alarm]:
        """Alarms that stand now; of two about the same, the one between steps."""
        return list({alarm.subject: alarm for alarm in self._of_steps.standing + self._between.standing}.values())


@dataclass(frozen=True)
class MonitorConfig:
    """What of the run file the monitors need."""

    limits: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    moving_tasks: bool = False
    max_flat_groups: int = 0


class RunMonitors:
    """The monitors of one run: the log's events and the metrics come in, changes of alarms come out.

    A step is looked at when the log has the version that it made, so that a second reading of the same log and metrics
    comes to the same alarms at the same steps.
    """

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

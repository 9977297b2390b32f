"""All monitors, and what turns their findings into alarms: one odd step is no alarm, and an alarm does not flicker.

The only list of the monitors. `Watch` is given a view for each step, and one between steps for what does not wait for
steps. It is a function of these views alone, so a launcher that starts again comes to the same alarms.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shoal.alarms import Alarm
from shoal.monitors import (
    clock,
    collapse,
    disk,
    entropy,
    log_ratio,
    no_signal,
    poisoning,
    reward_hacking,
    slow_publishing,
    stragglers,
    trainer_waits,
    validator_disagreement,
)
from shoal.monitors.inputs import LimitExceeded, MonitorInputs


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
    "drift": Monitor(log_ratio.look, 3, 5, 8),
    "collapse": Monitor(collapse.look, 3, 5, 10),
    "entropy": Monitor(entropy.look, 5, 6, 10),
    "hacking": Monitor(reward_hacking.look, 4, 6, 10),
    "poisoning": Monitor(poisoning.look, 2, 3, 10),
    "stragglers": Monitor(stragglers.look, 3, 5, 10),
    "validators": Monitor(validator_disagreement.look, 1, 1, 20),
    "no_signal": Monitor(no_signal.look, 4, 6, 6),
    "clock": Monitor(clock.look, 2, 3, 5),
    "starved": Monitor(trainer_waits.look, 3, 5, 5),
    "publishing": Monitor(slow_publishing.look, 5, 8, 8),
}
"""By name of the alarm: what is looked at once a step."""

BETWEEN: dict[str, Monitor] = {
    "disk": Monitor(disk.look, 2, 2, 5),
    "clock": Monitor(clock.look, 2, 3, 5),
    "starved": Monitor(trainer_waits.look, 3, 3, 3),
    "no_signal": Monitor(no_signal.look, 2, 2, 3),
}
"""The same for looks between steps, a few seconds apart: what must be seen though no step ends."""


class AlarmChange(NamedTuple):
    """An alarm was raised or cleared."""

    change: Literal["raised", "cleared"]
    alarm: Alarm


@dataclass
class _Watched:
    """What a monitor saw of one subject."""

    seen: deque[bool]
    raised: Alarm | None = None
    clean: int = 0


@dataclass
class _Table:
    """The monitors of one sort of look."""

    monitors: dict[str, Monitor]
    subjects: dict[tuple[str, str], _Watched] = field(default_factory=dict)

    def see(self, view: MonitorInputs, step: int) -> list[AlarmChange]:
        changes: list[AlarmChange] = []
        for cause, monitor in self.monitors.items():
            found: dict[str, LimitExceeded] = {}
            for finding in monitor.look(view):
                if finding.node in view.announced:
                    continue
                found.setdefault(finding.node, finding)
            known = [node for known_cause, node in self.subjects if known_cause == cause]
            for node in dict.fromkeys([*known, *found]):
                watched = self.subjects.setdefault((cause, node), _Watched(deque(maxlen=monitor.of)))
                changes += _judged(watched, monitor, cause, found.get(node), step)
                if watched.raised is None and not any(watched.seen):
                    del self.subjects[cause, node]
        return changes

    @property
    def standing(self) -> list[Alarm]:
        return [watched.raised for watched in self.subjects.values() if watched.raised is not None]


def _judged(
    watched: _Watched, monitor: Monitor, cause: str, finding: LimitExceeded | None, step: int
) -> Iterable[AlarmChange]:
    """Take a finding, or that there is none. Returns the change that it makes."""
    watched.seen.append(finding is not None)
    watched.clean = 0 if finding else watched.clean + 1
    before = watched.raised
    if finding is not None and (before or sum(watched.seen) >= monitor.found):
        since = before.since if before else step
        watched.raised = Alarm(
            cause, finding.severity, since, step, finding.summary, finding.remedy, finding.measured, finding.node
        )
        return [] if before else [AlarmChange("raised", watched.raised)]
    if before and watched.clean >= monitor.clear:
        watched.raised = None
        return [AlarmChange("cleared", before)]
    return []


class AlarmState:
    """All monitors of one run."""

    def __init__(self) -> None:
        self._of_steps, self._between = _Table(MONITORS), _Table(BETWEEN)

    def see(self, view: MonitorInputs) -> list[AlarmChange]:
        """Take a view: of a step that has ended, or between steps if it has a machine."""
        here, other = self._of_steps, self._between
        if view.machine is not None:
            here, other = other, here
        elsewhere = {alarm.subject for alarm in other.standing}
        return [change for change in here.see(view, view.step) if change.alarm.subject not in elsewhere]

    @property
    def standing(self) -> Sequence[Alarm]:
        """Alarms that stand now; of two about the same, the one between steps."""
        both = {alarm.subject: alarm for table in (self._of_steps, self._between) for alarm in table.standing}
        return list(both.values())

"""Alarms of a run: what one says, and the file in which they are kept, a line when one is raised and one when it is
cleared.

Written by `launch/alarm_actions`. It does not know how alarms come about; `shoal/monitors` does.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shoal.protocol.messages import AlarmEvidence, Measured

log = logging.getLogger(__name__)

Severity = Literal["notice", "warning", "critical"]
MAX_READ_BYTES = 8 * 1024 * 1024
"""Of an alarms file, the newest bytes that are read: some 10,000 alarms."""


class Alarm(msgspec.Struct, frozen=True):
    """One alarm, as its monitor last saw it."""

    cause: str
    """Name of the monitor."""
    severity: Severity
    since: int
    """Training step at which it was raised."""
    step: int
    """Newest training step that was seen."""
    summary: str
    """What is wrong, in one sentence."""
    remedy: str
    """What to do, in one sentence."""
    measured: tuple[Measured, ...] = ()
    """Figures with their limits."""
    node: str = ""
    """Key of the node that it is about, if it is about one."""

    @property
    def subject(self) -> tuple[str, str]:
        """What it is about: no two alarms with the same subject stand at a time."""
        return self.cause, self.node

    @property
    def heading(self) -> str:
        """What the line begins with that says it to a person."""
        return f"ALARM {self.cause} ({self.severity}) at step {self.since}: "

    @property
    def in_words(self) -> str:
        """It as one line. A remote host tells no remedy."""
        return f"{self.heading}{self.summary}" + (f". {self.remedy}" if self.remedy else "")

    @property
    def evidence(self) -> AlarmEvidence:
        """What a host's request says of it."""
        return AlarmEvidence(self.cause, self.since, self.step, self.measured, self.node)


class AlarmLine(msgspec.Struct, frozen=True):
    """A line of the file."""

    time_s: float
    """Seconds since the epoch."""
    change: Literal["raised", "cleared"]
    alarm: Alarm


class AlarmsLog:
    """Appends lines to a file, each change once, also after a restart that finds the same alarms again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[tuple[str, str, str, int]] = set()
        self._newest: dict[tuple[str, str], tuple[str, str, str, int]] = {}
        """The last change of each subject."""
        self._raised_s: dict[tuple[str, str], float] = {}
        """When each subject was raised that stands."""
        for line in read_alarms(path):
            self._know(line.change, line.alarm, line.time_s)

    def write(self, change: Literal["raised", "cleared"], alarm: Alarm, now: float, is_replayed: bool = True) -> bool:
        """Append a line, unless the file has it. Returns whether it is new. Faults of the disk are logged, never raised.

        `is_replayed`: a launcher that starts again finds the change again at the same step. One that is seen as it happens
        may be raised and cleared several times in one step, so only its repetition is no news.
        """
        identity = _identity(change, alarm)
        # guard: raised-again-in-a-step
        if identity in self._written if is_replayed else identity == self._newest.get(alarm.subject):
            return False
        self._know(change, alarm, now)
        try:
            with self.path.open("ab+") as file:
                # A killed writer may have left half a line: start the next one on its own line.
                file.seek(max(0, file.tell() - 1))
                whole = file.read(1) in (b"", b"\n")
                file.write(b"" if whole else b"\n")
                file.write(msgspec.json.encode(AlarmLine(now, change, alarm)) + b"\n")
        except OSError as error:
            log.warning("an alarm is not written, the run continues file=%s cause=%s", self.path, error)
        return True

    def raised_s(self, alarm: Alarm) -> float:
        """When an alarm that stands was raised; -infinity if the file does not say."""
        return self._raised_s.get(alarm.subject, -math.inf)

    def _know(self, change: Literal["raised", "cleared"], alarm: Alarm, time_s: float) -> None:
        self._newest[alarm.subject] = _identity(change, alarm)
        self._written.add(self._newest[alarm.subject])
        if change == "cleared":
            self._raised_s.pop(alarm.subject, None)
        else:
            self._raised_s.setdefault(alarm.subject, time_s)


def read_alarms(path: Path) -> list[AlarmLine]:
    """All lines of an alarms file, oldest first; half lines are skipped. Empty if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_READ_BYTES))
            data = file.read(MAX_READ_BYTES)
    except OSError:
        return []
    found = []
    for line in data.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=AlarmLine))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return found


def standing(lines: Iterable[AlarmLine]) -> Sequence[Alarm]:
    """Alarms that were raised and not cleared, oldest first."""
    found: dict[tuple[str, str], Alarm] = {}
    for line in lines:
        found.pop(line.alarm.subject, None)
        if line.change == "raised":
            found[line.alarm.subject] = line.alarm
    return list(found.values())


def standing_alarms(path: Path) -> Sequence[Alarm]:
    """The same of a file."""
    return standing(read_alarms(path))


class StandingAlarms:
    """The alarms of a file that stand now, for somebody who asks often: the file is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._standing: Sequence[Alarm] = ()

    def read(self) -> Sequence[Alarm]:
        """As `standing_alarms`."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        if self._seen != (seen := (found.st_mtime_ns, found.st_size)):
            self._seen, self._standing = seen, standing_alarms(self._path)
        return self._standing


def _identity(change: str, alarm: Alarm) -> tuple[str, str, str, int]:
    return change, alarm.cause, alarm.node, alarm.since

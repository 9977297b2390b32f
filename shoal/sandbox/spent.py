"""How much CPU time a tree of processes has taken, seen from outside.

Called by `sandbox/cell` while it waits. The kernel counts it for a control group of version 2. Elsewhere the times of the
processes are added up: those that a process waited for are in its own record, also for an orphan of the first process.
A process that ended unseen, and that nobody waited for, is not counted: one that lives less than a look.
"""

import contextlib
import os
from pathlib import Path

from shoal.sandbox.groups import Group
from shoal.sandbox.memory import processes_of

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Spent:
    """The CPU time of one sandbox."""

    def __init__(self, root: int, group: Group) -> None:
        self._root, self._group = root, group
        self._own: dict[tuple[int, str], int] = {}
        """Ticks of each process that was seen, by its id and its start: ids are used again."""

    def seconds(self) -> float:
        """So far."""
        counted = self._group.cpu_s()
        if counted > 0:
            return counted
        now = 0
        for pid in processes_of(self._root):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own, waited = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
                self._own[pid, fields[19]] = own
                now += own + waited
        return max(now, sum(self._own.values())) / _TICKS

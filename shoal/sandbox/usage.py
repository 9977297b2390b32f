"""CPU time and memory of the processes in a sandbox."""

import contextlib
import os
import resource
from pathlib import Path

from shoal.sandbox.cgroups import Cgroup

# --- How much memory a tree of processes takes, seen from outside ---
#
# That sum counts pages that a fork shares twice. If it exceeds the limit, the kernel is asked for the share of each
# process.


_PAGE = resource.getpagesize()


def exceeds(root: int, most_bytes: int) -> bool:
    """Whether the process and its descendants take more than this."""
    tree = _tree(root)
    if sum(_resident(pid) for pid in tree) <= most_bytes:
        return False
    return sum(_share(pid) for pid in tree) > most_bytes


def taken_bytes(root: int) -> int:
    """Memory of the process and its descendants."""
    return sum(_share(pid) for pid in _tree(root))


def processes_of(root: int) -> list[int]:
    """The process and its descendants, as this machine numbers them."""
    return _tree(root)


def _tree(root: int) -> list[int]:
    """Each thread lists the children that it forked."""
    tree = [root]
    for pid in tree:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                tree += map(int, (thread / "children").read_text().split())
    return tree


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _share(pid: int) -> int:
    """Its own pages, and its part of those that it shares. If the kernel does not tell, all pages that it uses."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)


# --- How much CPU time a tree of processes has taken, seen from outside ---
#
# The kernel counts it for a control group of version 2. Elsewhere the times of the processes are added up: those that a
# process waited for are in its own record, also for an orphan of the first process. A process that ended unseen, and that
# nobody waited for, is not counted: one that lives less than a look.


_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class CpuTime:
    """The CPU time of one sandbox."""

    def __init__(self, root: int, group: Cgroup) -> None:
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

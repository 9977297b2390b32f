"""What the processes of a sandbox take, and how much they may: control groups, and looks at a tree of processes.

Root may nearly always make groups; an ordinary user only where its own group was delegated to it. Without a group the other
limits remain: rlimits, sizes of file systems, and the looks.
"""

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

# --- Control groups: through them the kernel counts and limits the memory and processes of a whole sandbox ---

CONTROLLERS = ("memory", "pids")
_number = itertools.count()
_REMOVE_S = 2.0
"""A group stays busy for a moment after its last process has died."""


class Cgroup:
    """One group: a directory in version 2, one for each controller in version 1, none where we may not make groups."""

    def __init__(self, directories: list[Path]) -> None:
        self._directories = directories

    @staticmethod
    def make() -> "Cgroup":
        """A new group below ours, or a group without directories."""
        name = f"shoal-{os.getpid()}-{next(_number)}"
        for parents in _places():
            made: list[Path] = []
            for parent in parents:
                _sweep(parent)
                with contextlib.suppress(OSError):
                    (parent / name).mkdir()
                    made.append(parent / name)
            group = Cgroup(made)
            if len(made) == len(parents) and group._works():
                return group
            group.remove()
        return Cgroup([])

    @property
    def entries(self) -> list[str]:
        """Files to which a process writes its id in order to enter."""
        return [str(directory / "cgroup.procs") for directory in self._directories]

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Set both limits. No swap is allowed: it is memory, too, only slower."""
        for name, value in (
            ("memory.max", memory_bytes), ("memory.swap.max", 0), ("memory.limit_in_bytes", memory_bytes),
            ("memory.memsw.limit_in_bytes", memory_bytes), ("pids.max", processes),
        ):  # fmt: skip
            for directory in self._directories:
                if (directory / name).exists():
                    with contextlib.suppress(OSError):
                        (directory / name).write_text(str(value))

    def memory_bytes(self) -> int:
        """Memory in use now; 0 without a group."""
        for directory in self._directories:
            for name in ("memory.current", "memory.usage_in_bytes"):
                with contextlib.suppress(OSError, ValueError):
                    return int((directory / name).read_text())
        return 0

    def cpu_s(self) -> float:
        """CPU seconds that its processes have taken so far; 0 if the kernel does not say. Only version 2 does so without a
        controller of its own."""
        for directory in self._directories:
            with contextlib.suppress(OSError, ValueError, KeyError):
                words = dict(line.split() for line in (directory / "cpu.stat").read_text().splitlines())
                return int(words["usage_usec"]) / 1e6
        return 0.0

    def memory_kills(self) -> int:
        """How many processes the kernel has killed here because the group was full."""
        for directory in self._directories:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    words = dict(line.split() for line in (directory / name).read_text().splitlines())
                    return int(words.get("oom_kill", 0))
        return 0

    def remove(self) -> None:
        """Remove the group, once all of its processes are dead."""
        until = time.monotonic() + _REMOVE_S
        while self._directories and time.monotonic() < until:
            for directory in list(self._directories):
                with contextlib.suppress(OSError):
                    directory.rmdir()
                if not directory.exists():
                    self._directories.remove(directory)
            if self._directories:
                time.sleep(0.01)

    def _works(self) -> bool:
        files = [directory / name for directory in self._directories for name in ("pids.max", "cgroup.procs")]
        return len([f for f in files if os.access(f, os.W_OK)]) > 1


def _sweep(parent: Path) -> None:
    """Remove groups that killed nodes left behind. The kernel keeps a group that still has a process."""
    for old in parent.glob("shoal-*-*"):
        if not Path("/proc", old.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                old.rmdir()


def _places() -> Iterator[list[Path]]:
    """Directories in which a new group would have both controllers; the nearest to our own group first."""
    ours: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            ours |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    mounts = _mounts()
    if all(name in mounts and name in ours for name in CONTROLLERS):
        yield [mounts[name] / ours[name] for name in CONTROLLERS]
        yield [mounts[name] for name in CONTROLLERS]
    if "" in mounts and "" in ours:
        at = mounts[""] / ours[""]
        while at.is_relative_to(mounts[""]):
            with contextlib.suppress(OSError):
                if set(CONTROLLERS) <= set((at / "cgroup.subtree_control").read_text().split()):
                    yield [at]
            at = at.parent


def _mounts() -> dict[str, Path]:
    """Where each controller of version 1 is mounted; version 2 under the empty name."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options = line.split()[:4]
            if kind == "cgroup2":
                found[""] = Path(place)
            elif kind == "cgroup":
                found |= {name: Path(place) for name in options.split(",") if name in CONTROLLERS}
    return found


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

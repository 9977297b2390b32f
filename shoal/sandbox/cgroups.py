"""Control groups: through them the kernel counts and limits the memory and processes of a whole sandbox.

Root may nearly always make groups; an ordinary user only where its own group was delegated to it. Without a group the other
limits remain: rlimits, sizes of file systems, and the checks of `sandbox/usage`.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

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

"""One running sandbox: it is started, exchanges messages with our first program inside, and is watched and ended.

A call blocks only its own thread, and only until its deadline. This file does not know what the messages mean.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shoal.errors import StateError
from shoal.ipc import OUT_OF_MEMORY, Child, ChildExited, Reason
from shoal.sandbox import bubblewrap
from shoal.sandbox.bubblewrap import START_S
from shoal.sandbox.cgroups import Cgroup, CpuTime, exceeds, taken_bytes
from shoal.sandbox.filesystem import ENVIRONMENT, INSIDE, INTERPRETER_FLAGS, SandboxPath, interpreter, shown
from shoal.sandbox.limits import NO_LIMIT, Limits
from shoal.sandbox.seccomp import snippet_filter, zygote_filter

_IDLE_LOOK_S = 1.0
"""After this long without a check, check before the next answer is read: foreign code can go on after an answer."""

_MB = 1_000_000
_START_MB = 64
"""Extra memory for the processes that start a sandbox."""


OWN_PROCESSES = 16
"""Processes and threads that the sandbox itself needs in its control group."""


class Sandbox(Child):
    """A running sandbox. It ends on `end()`, when this object is freed, and when this process ends."""

    look_s = 0.025
    """Time between two checks of what a busy sandbox takes."""

    def __init__(self, limits: Limits, task: dict[str, Any], packages: Sequence[Path | SandboxPath] = ()) -> None:
        """Start it and give it its first message. Raises `StateError` if it cannot be started."""
        self.limits = limits
        if sys.platform != "linux":
            raise StateError(f"the sandbox needs Linux; this is {sys.platform}")
        self._group = Cgroup.make()
        self._processes = limits.processes + OWN_PROCESSES
        self._group.limit((limits.memory_mb + 2 * limits.scratch_mb + _START_MB) * _MB, self._processes)
        self._base_bytes, self._looked_s, self.stderr = 0, time.monotonic(), ""
        """`stderr` is what the sandbox wrote to standard error before it was ended, in one line."""
        self._spent: CpuTime | None = None
        first = task | {"limits": vars(limits), "filter": snippet_filter().hex(), "environment": ENVIRONMENT}
        program = [str(interpreter()), *INTERPRETER_FLAGS, INSIDE]
        sources, first_process = shown(packages), task["kind"] == "zygote"
        allowed = zygote_filter() if first_process else snippet_filter()
        with contextlib.ExitStack() as undo:
            undo.callback(self._group.remove)
            start = _starter().submit(bubblewrap.start, sources, limits, program, self._group, allowed, first_process)
            process, self._init = start.result()
            undo.pop_all()
        self._first = _FirstProcess(self._init)
        super().__init__(process, partial(_end, process, self._first, self._group))
        if not first_process and limits.cpu_s < NO_LIMIT:  # a zygote's snippets have limits of their own
            self._spent = CpuTime(self._init, self._group)
        try:
            self.send(json.dumps(first).encode(), START_S)
        except ChildExited as gone:
            raise StateError(f"the sandbox does not start: {self.stderr or gone}") from None

    @property
    def pid(self) -> int:
        """On this machine, of the process whose end ends all others."""
        return self._init

    def settle(self) -> None:
        """Count the memory limit from what is in use now."""
        self._base_bytes = taken_bytes(self._init)
        taken = max(self._group.memory_bytes(), self._base_bytes)
        most = taken + (self.limits.memory_mb + 2 * self.limits.scratch_mb) * _MB
        self._group.limit(most, self._processes)

    def kill(self) -> None:
        """End all that runs inside, from any thread."""
        self._first.kill()

    def runs(self) -> bool:
        """Whether its first process is alive. The pipe to it may take requests a little longer."""
        return not self._first.has_ended()

    def look(self) -> None:
        """Raise `ChildExited` if the sandbox takes more than it may."""
        self._looked_s = time.monotonic()
        most = self._base_bytes + self.limits.memory_mb * _MB
        if exceeds(self._init, most):  # guard: memory-of-a-sandbox
            raise self._takes_memory()
        if self._spent is not None and self._spent.seconds() > self.limits.cpu_s:  # guard: cpu-of-a-sandbox
            raise ChildExited(Reason.TIMEOUT, f"took more than {self.limits.cpu_s} s of CPU time")

    def memory_kills(self) -> int:
        return self._group.memory_kills()

    def exit_code(self) -> int | None:
        """The exit code of the program inside, negative for a signal. Bubblewrap gives 128 + signal instead."""
        code = super().exit_code()
        return 128 - code if code is not None and code > 128 else code

    def closed(self) -> ChildExited:
        """Why a sandbox closed its pipe."""
        code = self.exit_code()
        if self._group.memory_kills() or code == -OUT_OF_MEMORY:
            return self._takes_memory()
        if code == -signal.SIGKILL:
            return ChildExited(Reason.KILLED, "was ended by something else than its limits")
        if code == -signal.SIGXCPU:
            return ChildExited(Reason.TIMEOUT, f"took more than {self.limits.cpu_s} s of CPU time")
        return super().closed()

    def _wait(self, ready: "select.poll", until: float) -> None:
        if time.monotonic() - self._looked_s > _IDLE_LOOK_S:  # guard: memory-between-answers
            self.look()
        super()._wait(ready, until)

    def _takes_memory(self) -> ChildExited:
        return ChildExited(Reason.MEMORY, f"took more than {self.limits.memory_mb} MB of memory")

    def _give_up(self, gone: ChildExited) -> NoReturn:
        assert self.process.stderr
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self.process.stderr.fileno(), False)
            self.stderr = " ".join(os.read(self.process.stderr.fileno(), 2000).decode("utf-8", "replace").split())
        super()._give_up(gone)


class Resident(Sandbox):
    """A foreign program that stays in a sandbox and answers one request after another, as `Child` has them."""

    def __init__(
        self, program: Sequence[str], limits: Limits = Limits(), packages: Sequence[Path | SandboxPath] = ()
    ) -> None:
        """`program` is a command, with `interpreter()` as its first word; `packages` are paths that it may read, each
        at `outside(path)` or at the place named.

        `limits.memory_mb` includes the interpreter. `limits.cpu_s` is for the program's whole life. A program that
        catches its own `MemoryError` reports it by sending itself the signal SIGRTMAX. Raises `StateError`.
        """
        super().__init__(limits, {"kind": "resident", "program": list(program)}, packages)


# --- starting and ending ---


class _FirstProcess:
    """The first process of a sandbox, whose end ends every process in it. Any thread may use it."""

    def __init__(self, pid: int) -> None:
        self._lock = threading.Lock()
        """Held while the descriptor is used or closed: another file may then have its number."""
        try:
            self._watched = os.pidfd_open(pid)
        except OSError:  # it has ended already
            self._watched = -1

    def kill(self) -> None:
        with self._lock:
            if self._watched >= 0:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether it ends within `wait_s`."""
        if self._watched < 0:
            return True
        ended = select.poll()
        ended.register(self._watched, select.POLLIN)
        return bool(ended.poll(1000 * wait_s))

    def forget(self) -> None:
        with self._lock:
            if self._watched >= 0:
                os.close(self._watched)
            self._watched = -1  # guard: kill-reaches-no-other


def _end(process: "subprocess.Popen[bytes]", first: _FirstProcess, group: Cgroup) -> None:
    """Kill the first process of the sandbox: the kernel then kills all others. Wait until they are gone."""
    first.kill()
    if first.has_ended():  # it had ended before it was known
        process.kill()
    process.wait()
    first.has_ended(10.0)
    first.forget()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    group.remove()


_starters: list[ThreadPoolExecutor] = []
_starters_lock = threading.Lock()


def _starter() -> ThreadPoolExecutor:
    """One thread starts every sandbox and lives as long as this process: the kernel ends a sandbox with the *thread*
    that started it."""
    with _starters_lock:
        if not _starters:
            _starters.append(ThreadPoolExecutor(1, thread_name_prefix="sandbox"))
        return _starters[0]

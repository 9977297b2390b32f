"""One running sandbox: starts it, exchanges frames with it, watches its limits, and ends it with every process in it.

A call blocks only its own thread, and only until its deadline. This file does not know what the frames mean.
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
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.sandbox import bubblewrap
from shoal.sandbox.cgroups import Cgroup
from shoal.sandbox.filesystem import ENVIRONMENT, INSIDE, INTERPRETER_FLAGS, SandboxPath, interpreter, shown
from shoal.sandbox.limits import NO_LIMIT, Ended, Limits, Outcome, Reason, Stopped
from shoal.sandbox.process_handle import START_S
from shoal.sandbox.seccomp import snippet_filter, zygote_filter
from shoal.sandbox.usage import CpuTime, exceeds, taken_bytes

_LOOK_S = 0.025
"""Time between two checks of what a busy sandbox takes."""

_IDLE_LOOK_S = 1.0
"""After this long without a check, check before the next answer is read: foreign code can go on after an answer."""

_MB = 1_000_000
_START_MB = 64
"""Extra memory for the processes that start a sandbox."""


OWN_PROCESSES = 16
"""Processes and threads that the sandbox itself needs in its control group."""


class SandboxExited(Exception):
    """The sandbox did not answer, and was ended."""

    def __init__(self, reason: Reason | None, why: str = "", exit_code: int = 0) -> None:
        super().__init__(why or str(reason and reason.value))
        self.outcome: Outcome = Ended(exit_code) if reason is None else Stopped(reason)
        """`Ended` if the first program inside exited, else `Stopped`."""


class Sandbox:
    """A running sandbox. It ends on `end()`, when this object is freed, and when this process ends."""

    def __init__(self, limits: Limits, task: dict[str, Any], packages: Sequence[Path | SandboxPath] = ()) -> None:
        """Start it and give it its first frame. Raises `StateError` if it cannot be started."""
        self.limits = limits
        if sys.platform != "linux":
            raise StateError(f"the sandbox needs Linux; this is {sys.platform}")
        self._group = Cgroup.make()
        self._processes = limits.processes + OWN_PROCESSES
        self._group.limit((limits.memory_mb + 2 * limits.scratch_mb + _START_MB) * _MB, self._processes)
        self._base_bytes, self._looked_s = 0, time.monotonic()
        self._spent: CpuTime | None = None
        first = task | {"limits": vars(limits), "filter": snippet_filter().hex(), "environment": ENVIRONMENT}
        program = [str(interpreter()), *INTERPRETER_FLAGS, INSIDE]
        sources, first_process = shown(packages), task["kind"] == "zygote"
        allowed = zygote_filter() if first_process else snippet_filter()
        with contextlib.ExitStack() as undo:
            undo.callback(self._group.remove)
            start = _starter().submit(bubblewrap.start, sources, limits, program, self._group, allowed, first_process)
            self.process, self.init = start.result()
            undo.pop_all()
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._answers = select.poll()  # `select.select` fails above descriptor 1023
        self._answers.register(self._from, select.POLLIN)
        if not first_process and limits.cpu_s < NO_LIMIT:  # a zygote's snippets have limits of their own
            self._spent = CpuTime(self.init, self._group)
        self._watched = _watched(self.init)
        self.end: Callable[[], object] = weakref.finalize(self, _end, self.process, self._watched, self._group)
        try:
            self.send(json.dumps(first).encode())
        except SandboxExited:
            raise StateError(f"the sandbox does not start: {self.said()}") from None

    def settle(self) -> None:
        """Count the memory limit from what is in use now."""
        self._base_bytes = taken_bytes(self.init)
        taken = max(self._group.memory_bytes(), self._base_bytes)
        most = taken + (self.limits.memory_mb + 2 * self.limits.scratch_mb) * _MB
        self._group.limit(most, self._processes)

    def send(self, data: bytes) -> None:
        """Raises `Gone` if nobody reads it."""
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        until = time.monotonic() + START_S
        os.set_blocking(self._to, False)
        writable = select.poll()
        writable.register(self._to, select.POLLOUT)
        while rest:
            if not writable.poll(1000 * max(0.0, until - time.monotonic())):
                raise self._gone(Reason.TIMEOUT, "it reads no requests")
            try:
                rest = rest[os.write(self._to, rest[: 1 << 16]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._ended() from None

    def receive(self, until: float, most_bytes: int) -> bytes:
        """The next frame. Raises `Gone` after `until`, on the clock of `time.monotonic`."""
        size = int.from_bytes(self._read(4, until), "big")
        if size > most_bytes:  # guard: frames-of-a-sandbox
            raise self._gone(Reason.KILLED, f"it answered with {size} bytes, limit {most_bytes}")
        return self._read(size, until)

    def kill(self) -> None:
        """End all that runs inside. Any thread may call it; who waits for an answer then gets `Gone`."""
        if self._watched >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def runs(self) -> bool:
        """Whether its first process is alive. The pipe to it may take requests a little longer."""
        if self._watched < 0:
            return False
        ended = select.poll()
        ended.register(self._watched, select.POLLIN)
        return not ended.poll(0)

    def memory_kills(self) -> int:
        return self._group.memory_kills()

    def said(self) -> str:
        """What the sandbox wrote to standard error, in one line."""
        assert self.process.stderr
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(self.process.stderr.fileno(), False)
            return " ".join(os.read(self.process.stderr.fileno(), 2000).decode("utf-8", "replace").split())
        return ""

    def _read(self, size: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(until)
            piece = os.read(self._from, min(size - len(data), 1 << 20))
            if not piece:
                raise self._ended()
            data += piece
        return bytes(data)

    def _wait(self, until: float) -> None:
        """Wait until there is something to read. End the sandbox if it passes a limit first."""
        if time.monotonic() - self._looked_s > _IDLE_LOOK_S:  # guard: memory-between-answers
            self._look()
        while not self._answers.poll(1000 * max(0.0, min(_LOOK_S, until - time.monotonic()))):
            if time.monotonic() >= until:  # guard: wall-time-of-a-sandbox
                raise self._gone(Reason.TIMEOUT)
            self._look()

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        most = self._base_bytes + self.limits.memory_mb * _MB
        if exceeds(self.init, most):  # guard: memory-of-a-sandbox
            raise self._gone(Reason.MEMORY)
        if self._spent is not None and self._spent.seconds() > self.limits.cpu_s:  # guard: cpu-of-a-sandbox
            raise self._gone(Reason.TIMEOUT)

    def _ended(self) -> SandboxExited:
        """Why a sandbox closed its pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = exit_code(self.process.returncode)
        if self._group.memory_kills() or code == -signal.SIGRTMAX:
            return self._gone(Reason.MEMORY)
        if code is None or code == -signal.SIGKILL:
            return self._gone(Reason.KILLED)
        if code == -signal.SIGXCPU:
            return self._gone(Reason.TIMEOUT)
        return self._gone(None, f"it ended with exit code {code}", code)

    def _gone(self, reason: Reason | None, why: str = "", code: int = 0) -> SandboxExited:
        said = self.said()
        self.end()
        return SandboxExited(reason, " ".join(filter(None, (why, said))), code)


def exit_code(code: int | None) -> int | None:
    """The exit code of the program inside, negative for a signal. Bubblewrap gives 128 + signal instead."""
    return 128 - code if code is not None and code > 128 else code


# --- starting and ending ---


def _watched(init: int) -> int:
    """A descriptor that becomes readable when the sandbox's first process, and so every process in it, has ended. -1 if
    it already has."""
    try:
        return os.pidfd_open(init)
    except OSError:
        return -1


def _end(process: "subprocess.Popen[bytes]", watched: int, group: Cgroup) -> None:
    """Kill the first process of the sandbox: the kernel then kills all others. Wait until they are gone."""
    if watched >= 0:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    if watched >= 0:
        ended = select.poll()
        ended.register(watched, select.POLLIN)
        ended.poll(10_000)
        os.close(watched)
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

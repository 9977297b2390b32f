"""Warm interpreters in sandboxes, which run one snippet after another.

Each place of the pool is a sandbox with a zygote (`sandbox/init`) that has done the pool's imports. Each snippet is a fork
of the zygote in new namespaces, so nothing of it reaches the next one. A call blocks only its own thread; from asyncio, use
`soon`.
"""

import asyncio
import json
import os
import queue
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.sandbox.filesystem import outside, standard_paths
from shoal.sandbox.limits import Ended, Limits, Outcome, Reason, Stopped
from shoal.sandbox.process_handle import START_S
from shoal.sandbox.sandbox import Sandbox, SandboxExited

GRACE_S = 5.0
"""The zygote ends a snippet when its time is up. If the zygote has not answered this much later, we end the sandbox."""

MAX_REPORT_BYTES = 4096
_OUT_OF_MEMORY = signal.SIGRTMAX
_OVER_TIME = signal.SIGXCPU


class Pool:
    """Places for snippets. Close it, or use it with `with`."""

    def __init__(
        self, size: int = 0, limits: Limits = Limits(), imports: Sequence[str] = (), packages: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """`size` is the number of places, 0 for one per core. A place starts when it is first needed, and does the
        `imports` once. `packages` are directories that the sandbox shows, and searches for imports."""
        self.size = size or len(os.sched_getaffinity(0))
        self._limits, self._packages = limits, [path.absolute() for path in packages]
        paths = [*standard_paths(), *(str(outside(package)) for package in self._packages)]
        self._task = {"kind": "zygote", "imports": list(imports), "paths": paths}
        self._places: queue.LifoQueue[_PooledSandbox] = queue.LifoQueue()
        for _ in range(self.size):
            self._places.put(_PooledSandbox(self))
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="snippet")

    def run(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> Outcome:
        """Run Python source as a script, when a place is free. `limits` can only lower the pool's.

        Raises `StateError` if the sandbox does not start here, or an import of the pool fails.
        """
        place = self._places.get()
        try:
            return place.run(source.encode("utf-8", "replace"), stdin, _lower(limits or self._limits, self._limits))
        finally:
            self._places.put(place)

    async def soon(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> Outcome:
        """The same from asyncio. If the caller is cancelled, the snippet goes on to its end or its limits."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.run, source, stdin, limits)

    def warm(self) -> None:
        """Start all places now. Raises as `run`."""
        places = [self._places.get() for _ in range(self.size)]
        try:
            for place in places:
                place.ready()
        finally:
            for place in places:
                self._places.put(place)

    def peek(self) -> int:
        """The process id, on this machine, of the first process of an idle sandbox."""
        place = self._places.get()
        try:
            return place.ready().init
        finally:
            self._places.put(place)

    def close(self) -> None:
        """End every sandbox after its snippet has ended."""
        self._threads.shutdown()
        for _ in range(self.size):
            self._places.get().close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Sandbox:
        cell = Sandbox(self._limits, self._task, self._packages)
        try:
            started = json.loads(cell.receive(time.monotonic() + START_S, MAX_REPORT_BYTES))
        except SandboxExited as gone:
            raise StateError(f"the sandbox does not start, or its imports take too much: {gone}") from None
        if failed := started.get("failed"):
            cell.end()
            raise StateError(f"an import in the sandbox fails: {failed.strip()}")
        cell.settle()
        return cell


class _PooledSandbox:
    """One sandbox. If it was ended, the next use starts another."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._cell: Sandbox | None = None

    def ready(self) -> Sandbox:
        if self._cell is not None and not self._cell.runs():  # something ended it while it waited for work
            self.close()
        self._cell = self._cell or self._pool._open()
        return self._cell

    def run(self, source: bytes, stdin: bytes, limits: Limits) -> Outcome:
        try:
            return self._run(self.ready(), source, stdin, limits)
        except SandboxExited as gone:
            self._cell = None
            return gone.outcome if isinstance(gone.outcome, Stopped) else Stopped(Reason.KILLED)

    def _run(self, cell: Sandbox, source: bytes, stdin: bytes, limits: Limits) -> Outcome:
        request = json.dumps({"limits": vars(limits)}).encode()
        cell.send(request)
        kills = cell.memory_kills()
        cell.send(source)
        cell.send(stdin)
        until = time.monotonic() + limits.wall_s + GRACE_S
        report = json.loads(cell.receive(until, MAX_REPORT_BYTES))
        stdout, stderr = (cell.receive(until, limits.output_bytes) for _ in range(2))
        return _outcome(report, stdout, stderr, limits, cell.memory_kills() > kills)

    def close(self) -> None:
        if self._cell is not None:
            self._cell.end()
            self._cell = None


def _outcome(report: dict[str, Any], stdout: bytes, stderr: bytes, limits: Limits, memory_kill: bool) -> Outcome:
    """The zygote's report as an `Outcome`. Raises `StateError` if the zygote could not isolate the snippet."""
    if report.get("failed"):
        raise StateError(f"the sandbox cannot isolate a snippet: {report['failed']}")
    told = {name: report[name] for name in ("stdout_truncated", "stderr_truncated", "cpu_s")}
    if not report["in_time"]:
        return Stopped(Reason.TIMEOUT, stdout, stderr, **told)
    status = report["status"]
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if memory_kill or code == -_OUT_OF_MEMORY:
        return Stopped(Reason.MEMORY, stdout, stderr, **told)
    if code == -_OVER_TIME or (code == -signal.SIGKILL and report["cpu_s"] >= limits.cpu_s):
        return Stopped(Reason.TIMEOUT, stdout, stderr, **told)
    if code == -signal.SIGKILL:
        return Stopped(Reason.KILLED, stdout, stderr, **told)
    return Ended(code, stdout, stderr, **told)


def _lower(asked: Limits, most: Limits) -> Limits:
    """The limits asked for, but none above the pool's: the sandbox was made for those."""
    return replace(asked, **{name: min(value, getattr(most, name)) for name, value in vars(asked).items()})

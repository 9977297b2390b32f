"""Warm interpreters in sandboxes, which run one snippet after another.

Each place of the pool is a sandbox with a zygote (`sandbox/init`) that has done the pool's imports. Each snippet is a fork
of the zygote in new namespaces, so nothing of it reaches the next one. A call blocks only its own thread.
"""

import json
import os
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.errors import StateError
from shoal.ipc import OUT_OF_MEMORY, ChildExited, Reason
from shoal.sandbox.bubblewrap import START_S
from shoal.sandbox.filesystem import outside, standard_paths
from shoal.sandbox.limits import Ended, Limits, Outcome, Stopped
from shoal.sandbox.sandbox import Sandbox

GRACE_S = 5.0
"""The zygote ends a snippet when its time is up. If the zygote has not answered this much later, we end the sandbox."""

MAX_REPORT_BYTES = 4096
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

    def run(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> Outcome:
        """Run Python source as a script, when a place is free. `limits` can only lower the pool's.

        Raises `StateError` if the sandbox does not start here, or an import of the pool fails.
        """
        place = self._places.get()
        try:
            return place.run(source.encode("utf-8", "replace"), stdin, _lower(limits or self._limits, self._limits))
        finally:
            self._places.put(place)

    def peek(self) -> int:
        """The process id, on this machine, of the first process of an idle sandbox."""
        place = self._places.get()
        try:
            return place.ready().pid
        finally:
            self._places.put(place)

    def close(self) -> None:
        """End every sandbox after its snippet has ended."""
        for _ in range(self.size):
            self._places.get().close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Sandbox:
        cell = Sandbox(self._limits, self._task, self._packages)
        try:
            started = cell.decoded(cell.receive(START_S, MAX_REPORT_BYTES), _report)
        except ChildExited as gone:
            why = f"it {gone} {cell.stderr}".strip()
            raise StateError(f"the sandbox does not start, or its imports take too much: {why}") from None
        if started.failed:
            cell.end()
            raise StateError(f"an import in the sandbox fails: {started.failed.strip()}")
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
        except ChildExited as gone:
            self._cell = None
            return Stopped(gone.reason or Reason.KILLED)

    def _run(self, cell: Sandbox, source: bytes, stdin: bytes, limits: Limits) -> Outcome:
        kills = cell.memory_kills()
        for part in (json.dumps({"limits": vars(limits)}).encode(), source, stdin):
            cell.send(part, START_S)
        until = time.monotonic() + limits.wall_s + GRACE_S
        report, stdout, stderr = (
            cell.receive(until - time.monotonic(), most_bytes)
            for most_bytes in (MAX_REPORT_BYTES, limits.output_bytes, limits.output_bytes)
        )
        return _outcome(cell.decoded(report, _report), stdout, stderr, limits, cell.memory_kills() > kills)

    def close(self) -> None:
        if self._cell is not None:
            self._cell.end()
            self._cell = None


class _Report(msgspec.Struct):
    """What a zygote says of its imports, or of a snippet. Imports are foreign code, and share its process."""

    failed: str = ""
    status: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 16)] | None = None
    in_time: bool = True
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    cpu_s: float = 0.0


def _report(data: bytes) -> _Report:
    """Raises `ValueError`."""
    report = _decode(data)
    if report.status is not None and not report.failed:
        os.waitstatus_to_exitcode(report.status)  # raises if it is none
    return report


_decode = msgspec.json.Decoder(_Report).decode


def _outcome(report: _Report, stdout: bytes, stderr: bytes, limits: Limits, memory_kill: bool) -> Outcome:
    """The zygote's report as an `Outcome`. Raises `StateError` if the zygote could not isolate the snippet."""
    if report.failed:
        raise StateError(f"the sandbox cannot isolate a snippet: {report.failed}")
    told = report.stdout_truncated, report.stderr_truncated, report.cpu_s
    if not report.in_time:
        return Stopped(Reason.TIMEOUT, stdout, stderr, *told)
    code = os.waitstatus_to_exitcode(report.status) if report.status is not None else -signal.SIGKILL
    if memory_kill or code == -OUT_OF_MEMORY:
        return Stopped(Reason.MEMORY, stdout, stderr, *told)
    if code == -_OVER_TIME or (code == -signal.SIGKILL and report.cpu_s >= limits.cpu_s):
        return Stopped(Reason.TIMEOUT, stdout, stderr, *told)
    if code == -signal.SIGKILL:
        return Stopped(Reason.KILLED, stdout, stderr, *told)
    return Ended(code, stdout, stderr, *told)


def _lower(asked: Limits, most: Limits) -> Limits:
    """The limits asked for, but none above the pool's: the sandbox was made for those."""
    return replace(asked, **{name: min(value, getattr(most, name)) for name, value in vars(asked).items()})

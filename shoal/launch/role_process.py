"""Processes of roles: how they start, log and end."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
from msgspec.structs import replace

from shoal.config import child_environment
from shoal.errors import EXIT_DONE, EXIT_USER_ERROR
from shoal.launch.log_rotation import LogFile
from shoal.ledger.remedies import CONTINUE_REMEDY, ENDED_CALLS, IS_STOPPED
from shoal.protocol.messages import Status
from shoal.runs.run_status import suspended_process

MAX_QUICK_DEATHS = 5
"""A role is given up after this many deaths in a row, each less than QUICK_DEATH_S after its start."""

QUICK_DEATH_S = 10.0

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0

State = Literal["running", "restarting", "done", "given up"]


@dataclass(frozen=True)
class RoleUsage:
    """CPU time and peak memory of a role, over all its starts."""

    cpu_s: float = 0.0
    peak_rss_mb: float = 0.0

    def __add__(self, other: "RoleUsage") -> "RoleUsage":
        return RoleUsage(self.cpu_s + other.cpu_s, max(self.peak_rss_mb, other.peak_rss_mb))


@dataclass(eq=False)
class RoleProcess:
    """A role's command, kept alive by `tend`."""

    name: str
    command: Sequence[str]
    log: Path
    threads: int
    lock_fd: int = -1
    """Inherited by the child, so that the run folder stays locked while any of its processes lives."""
    state: State = "restarting"
    restarts: int = 0
    reason: str = ""
    """Why it was given up, one line."""
    death: str = ""
    """How it died last: a signal or an exit code."""
    use: RoleUsage = RoleUsage()
    _begins_at: int = 0
    """Size of its log when it was last started, bytes."""
    _process: subprocess.Popen[bytes] | None = None
    _files: LogFile = field(init=False)
    _quick_deaths: int = 0
    _started: float = 0.0
    _start_at: float = 0.0

    def __post_init__(self) -> None:
        self._files = LogFile(self.log)

    def tend(self, now: float | None = None) -> None:
        """Reap the process if it died, and start it if it is due: call this a few times a second."""
        now = time.monotonic() if now is None else now
        if self._process is not None:
            self._files.look(now)
            if self._reap(now):
                self._process = None
        if self._process is None and self.state == "restarting" and now >= self._start_at:
            self._start(now)

    @property
    def pid(self) -> int | None:
        """Process id while it lives."""
        return self._process.pid if self._process is not None else None

    def last_words(self, num_lines: int) -> list[str]:
        """What it logged last since it was last started, without the reason for which it was given up."""
        lines = tail(self.log, num_lines, self._begins_at)
        return lines[:-1] if lines and _without_error(lines[-1]) == self.reason else lines

    def use_so_far(self) -> RoleUsage:
        """Its use over all starts, including the current one."""
        if self.pid is None:
            return self.use
        try:
            process = psutil.Process(self.pid)
            times = process.cpu_times()
            return self.use + RoleUsage(times.user + times.system, process.memory_info().rss / 2**20)
        except psutil.Error:
            return self.use

    def ask_to_end(self) -> None:
        """SIGTERM, and no restart."""
        self._end_with(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and no restart."""
        self._end_with(signal.SIGKILL)

    def _end_with(self, number: signal.Signals) -> None:
        if self.state in ("running", "restarting"):
            self.state = "done"
        if self._process is not None:
            # Not Popen.send_signal, which would reap a dead child before `_reap` learns what it used.
            os.kill(self._process.pid, number)

    def keeps_dying(self) -> bool:
        """Whether it died, and has not run for long since."""
        return self.restarts > 0 and (self.state == "restarting" or time.monotonic() - self._started < QUICK_DEATH_S)

    def _start(self, now: float) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._begins_at = log.tell()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=child_environment(self.threads),
                start_new_session=True,
                pass_fds=() if self.lock_fd < 0 else (self.lock_fd,),
            )
        self._started, self.state = now, "running"

    def _reap(self, now: float) -> bool:
        """Whether it has died. If so, decide what follows. `os.wait4` also says how much it used."""
        process = self._process
        assert process is not None
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid == 0:
            return False
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.stdin is not None:
            process.stdin.close()
        self.use += _use(usage)
        if self.state == "running":
            self._decide(process.returncode, now)
        return True

    def _decide(self, code: int, now: float) -> None:
        if code == EXIT_DONE:
            self.state = "done"
            return
        if code == EXIT_USER_ERROR:
            self.state, self.reason = "given up", last_line(self.log, self._begins_at)
            return
        self.death = _death(code)
        # SIGKILL comes from an operator or from the kernel out of memory, so a restart need not end the same way.
        quick = now - self._started < QUICK_DEATH_S and code != -signal.SIGKILL
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            self.state = "given up"
            self.reason = (
                f"{self.name} died {MAX_QUICK_DEATHS} times in a row, each time less than {QUICK_DEATH_S:.0f} s after its "
                f"start, the last time with {self.death}"
            )
            return
        self.state, self.restarts = "restarting", self.restarts + 1
        self._start_at = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._quick_deaths)


def last_line(log: Path, begins_at: int = 0) -> str:
    """The last line that says something, without the `error: ` in front."""
    lines = tail(log, 1, begins_at)
    return _without_error(lines[0]) if lines else "its log is empty"


def _without_error(line: str) -> str:
    return line.removeprefix("error: ")


def tail(log: Path, num_lines: int, begins_at: int = 0) -> list[str]:
    """The last non-empty lines of a log after so many bytes; looks only at its last 16 KiB. If it is shorter, it was begun
    anew since."""
    try:
        with log.open("rb") as file:
            size = log.stat().st_size
            file.seek(max(begins_at if begins_at <= size else 0, size - 16384))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


def die_with_parent() -> None:
    """Called in the child: end this process at once when standard input closes, that is when the launcher is gone.

    It is killed, not stopped cleanly: every role must survive that anyway, and the launcher can be started again sooner.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def own_use() -> RoleUsage:
    """What this process has used so far."""
    return _use(resource.getrusage(resource.RUSAGE_SELF))


def _use(usage: resource.struct_rusage) -> RoleUsage:
    return RoleUsage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / _RSS_UNITS_PER_MB)


def _death(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


_RSS_UNITS_PER_MB = 1024.0 * 1024.0 if sys.platform == "darwin" else 1024.0
"""`ru_maxrss` counts bytes on macOS and KiB elsewhere."""


_SILENT = re.compile(r"([^,;:]+) \(([0-9a-f]{12})\) (?:silent for|left)")
"""Name and start of the key of a node that a wait blames."""


def with_suspended(
    status: Status, processes: Iterable[RoleProcess], keys_of: Callable[[Iterable[str]], Mapping[str, str]]
) -> Status:
    """What a run waits for, with those processes of its role that were stopped by a signal, and how these go on. What to do
    about other nodes that it names stays. `keys_of`: keys of the host's own nodes by the names of their processes."""
    found = {
        process.name: process.pid
        for process in processes
        if process.name.partition("-")[0] in status.waiting_for.partition(":")[0] and suspended_process(process.pid)
    }
    if not found:
        return status
    stopped = (f"{name}: its process {pid} {IS_STOPPED}" for name, pid in found.items())
    cause, remedy = status.waiting_for, CONTINUE_REMEDY.replace("PID", " ".join(map(str, found.values())))
    own = {key[:12] for key in keys_of(found).values()}
    others = [name.strip() for name, key in _SILENT.findall(cause) if key not in own]  # guard: name-is-no-process
    if others and (before := status.remedy):
        remedy = f"{remedy}. For {', '.join(others)}: {before[0].lower()}{before[1:]}"
    return replace(status, waiting_for="; ".join((cause, *stopped)), remedy=remedy)


def with_ended_call(status: Status, processes: Iterable[RoleProcess]) -> Status:
    """What a run waits for; if that is a turn of the stage, with the call of an environment that the stage ended last."""
    log = next((process.log for process in processes if process.name == "stage"), None)
    if log is None or ENDED_CALLS not in status.waiting_for:
        return status
    ended = [line.partition("reason=")[2] for line in tail(log, 100) if "killed env=" in line]
    last = f", last {ended[-1]}" if ended else ""
    return replace(status, waiting_for=status.waiting_for.replace(ENDED_CALLS, f"{ENDED_CALLS}{last}"))

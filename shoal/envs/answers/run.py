"""The interface through which verifiers run programs, and two places that run them.

Verifiers that run a program take an argument `run` of type `Run`. `in_pool` runs programs in a sandbox: use it for programs
that a policy wrote. `in_child` limits time, memory and output, but isolates nothing: the program can read files and use
the network. It is for our own programs on hostile data, such as that of `mathematics`.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, Literal, NamedTuple, Protocol, TypeAlias

from shoal.sandbox.limits import Limits as BoxLimits
from shoal.sandbox.limits import Reason, Stopped
from shoal.sandbox.pool import Pool

Outcome: TypeAlias = Literal["ended", "time", "memory", "output", "failed"]
"""How a program ended. `ended`: it exited, with any exit code. `time`, `memory`, `output`: it reached that limit.
`failed`: it could not be run, or something else killed it. All but the first depend on the machine."""


class Limits(NamedTuple):
    """What a program may take."""

    time_s: float = 5.0
    """CPU-seconds. Wall time may be four times as long, because the machine may be busy."""
    memory_mb: int = 1024
    """Address space."""
    output_bytes: int = 1 << 20
    """Bytes of standard output, and of standard error."""


class Ran(NamedTuple):
    """The result of a program."""

    stdout: bytes
    stderr: bytes
    exit: int | None
    """The exit code; None unless the outcome is `ended`."""
    outcome: Outcome


class Run(Protocol):
    """Runs a Python program once, in a fresh process, and ends every process that the program started."""

    def __call__(self, program: bytes, stdin: bytes, limits: Limits) -> Ran: ...


def in_pool(pool: Pool) -> Run:
    """Runs programs in a pool of sandboxes. A program gets no more than the limits of the pool."""

    def run(program: bytes, stdin: bytes, limits: Limits) -> Ran:
        """Raises `StateError` if the sandbox does not start here."""
        most = BoxLimits(
            wall_s=4 * limits.time_s,
            cpu_s=math.ceil(limits.time_s),
            memory_mb=limits.memory_mb,
            output_bytes=limits.output_bytes,
        )
        ran = pool.run(program.decode(), stdin, most)
        if isinstance(ran, Stopped):
            return Ran(ran.stdout, ran.stderr, None, _STOPPED[ran.reason])
        if ran.stdout_truncated or ran.stderr_truncated:
            return Ran(ran.stdout, ran.stderr, None, "output")
        if ran.exit_code < 0:
            return Ran(ran.stdout, ran.stderr, None, "failed")
        return Ran(ran.stdout, ran.stderr, ran.exit_code, "ended")

    return run


_STOPPED: dict[Reason, Outcome] = {Reason.TIMEOUT: "time", Reason.MEMORY: "memory", Reason.KILLED: "failed"}


def in_child(program: bytes, stdin: bytes, limits: Limits) -> Ran:
    """Run one of our own programs in a child process. It sees none of this process's environment variables."""
    with tempfile.TemporaryFile() as code, tempfile.TemporaryFile() as given, _file() as out, _file() as err:
        for file, data in ((code, program), (given, stdin)):
            file.write(data)
            file.seek(0)
        numbers = (code.fileno(), limits.time_s, limits.memory_mb, limits.output_bytes)
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-c", _BOOTSTRAP, *map(str, numbers)],
            stdin=given, stdout=out, stderr=err, pass_fds=(code.fileno(),), start_new_session=True,
            env={"PATH": os.defpath, "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            code_of_exit: int | None = process.wait(4 * limits.time_s)
        except subprocess.TimeoutExpired:
            code_of_exit = None
        finally:
            _kill(process)
        outcome = _outcome(code_of_exit, out, err, limits)
        return Ran(_read(out, limits), _read(err, limits), code_of_exit if outcome == "ended" else None, outcome)


NO_MEMORY = 77
"""Exit code with which our own programs report that memory ran out."""

# The limits hold from the program's first line. Output goes to a file, so the kernel limits its size.
_BOOTSTRAP = """
import math, os, resource, sys
code, time_s, memory_mb, output_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with open(code, "rb") as file:
    program = file.read()
seconds = math.ceil(time_s)
for which, soft, hard in (
    (resource.RLIMIT_CPU, seconds, seconds + 1),
    (resource.RLIMIT_AS, memory_mb << 20, memory_mb << 20),
    (resource.RLIMIT_FSIZE, output_bytes + 1, output_bytes + 1),
    (resource.RLIMIT_CORE, 0, 0),
):
    try:
        resource.setrlimit(which, (soft, hard))
    except (ValueError, OSError):
        pass
sys.argv[1:] = []
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _outcome(code: int | None, out: IO[bytes], err: IO[bytes], limits: Limits) -> Outcome:
    if any(os.fstat(file.fileno()).st_size > limits.output_bytes for file in (out, err)):
        return "output"
    if code is None or code == -signal.SIGXCPU:
        return "time"
    if code == NO_MEMORY:
        return "memory"
    return "ended" if code >= 0 else "failed"


def _read(file: IO[bytes], limits: Limits) -> bytes:
    file.seek(0)
    return file.read(limits.output_bytes)

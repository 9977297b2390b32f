"""A process in which an environment is checked: in the sandbox, or where there is none, a child with less around it.

Both are spoken to in frames: requests are JSON; answers are bytes, which `check/frames` reads.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.envs.lint.messages import CALL
from shoal.sandbox.filesystem import INTERPRETER_FLAGS, interpreter, outside, standard_paths
from shoal.sandbox.limits import Limits, Reason, Stopped
from shoal.sandbox.sandboxed_process import Resident

LIMITS = Limits(wall_s=60, cpu_s=60, memory_mb=4096, processes=64, open_files=256, scratch_mb=64, file_mb=32)
"""Of the sandbox. The process limits its own memory below this, so that a fault names a line."""

GRACE_S = 2.0
"""A process ends what takes too long and says where. We end the process if it has not answered so much later."""

MAX_ANSWER_BYTES = 16 << 20

_BEGIN = """
import os, sys
seed, zone, *rest = sys.argv[1:]
os.environ.update(PYTHONHASHSEED=seed, TZ=zone, OMP_NUM_THREADS="1")
os.execv(sys.executable, [sys.executable, *rest])
"""
"""A hash seed counts from the start of an interpreter."""

_SERVE = """
import sys
sys.path[:] = sys.argv[1:]
from shoal.envs.lint.worker import main
main()
"""


class Failed(Exception):
    """The process gave no answer: the message says how it ended."""

    def __init__(self, why: str, reason: Reason | None = None, seen: Sequence[Sequence[str]] | None = None) -> None:
        """`seen`: what the environment did until then, if the process could say so, and why it ended itself."""
        super().__init__(why)
        self.reason, self.seen = reason, seen
        self.call = ""
        """The call that the environment's code was in, as it said."""
        self.doing = ""
        """What was asked of the process."""


class Process(Protocol):
    """One process."""

    call: str
    """The call that the environment's code was in last, as the process says."""

    def ask(self, limit_s: float, **request: Any) -> bytes:
        """Its answer, which its code may have written. Raises `Failed`."""
        ...

    def close(self) -> None: ...


class Sandboxed:
    """In a sandbox. Raises `StateError` if that does not start here."""

    call = ""

    def __init__(self, hash_seed: int, zone: str, shown: Sequence[Path], dependencies: Sequence[Path]) -> None:
        code, packages = Path(__file__).parents[2], importable()
        paths = [*standard_paths(), *(str(outside(path)) for path in (code.parent, *dependencies, *packages))]
        flags = [str(interpreter()), *INTERPRETER_FLAGS, "-c"]
        program = [*flags, _BEGIN, str(hash_seed), zone, *flags[1:], _SERVE, *paths]
        self._resident = Resident(program, LIMITS, sorted({code, *packages, *shown}))

    def ask(self, limit_s: float, **request: Any) -> bytes:
        request["limit_s"] = limit_s
        until = time.monotonic() + limit_s + GRACE_S
        answer = self._resident.ask(json.dumps(request).encode(), limit_s + GRACE_S, MAX_ANSWER_BYTES)
        while isinstance(answer, bytes) and answer.startswith(CALL):
            self.call = _call_in(answer, until)
            answer = self._resident.next(max(0.1, until - time.monotonic()), MAX_ANSWER_BYTES)
        if isinstance(answer, bytes):
            return answer
        if isinstance(answer, Stopped) and answer.reason is Reason.KILLED:
            raise Failed("its process was killed, by itself or because memory ran out,", answer.reason)
        if isinstance(answer, Stopped):
            raise Failed(f"it was stopped at its limit of {answer.reason.value}", answer.reason)
        raise Failed(_ended(answer.exit_code))

    def close(self) -> None:
        self._resident.close()


class WorkerProcess:
    """A child process of this user, with network and files."""

    call = ""

    def __init__(self, hash_seed: int, zone: str) -> None:
        paths = [str(Path(__file__).parents[3]), *sys.path]
        flags = ["-s", "-P", "-B", "-c"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, _BEGIN, str(hash_seed), zone, *flags, _SERVE, *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def ask(self, limit_s: float, **request: Any) -> bytes:
        assert self._process.stdin and self._process.stdout
        request["limit_s"] = limit_s
        data, until = json.dumps(request).encode(), time.monotonic() + limit_s + GRACE_S
        try:
            self._process.stdin.write(len(data).to_bytes(4, "big") + data)
            self._process.stdin.flush()
            while (answer := self._read(int.from_bytes(self._read(4, until), "big"), until)).startswith(CALL):
                self.call = _call_in(answer, until)
            return answer
        except (BrokenPipeError, EOFError):
            raise Failed(_ended(self._code())) from None

    def _code(self) -> int | None:
        """None if it only closed its pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout
        pipe, data = self._process.stdout.fileno(), bytearray()
        if size > MAX_ANSWER_BYTES:
            raise Failed(f"it answered with {size} bytes, limit {MAX_ANSWER_BYTES}")
        while len(data) < size:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise Failed("it did not answer in time", Reason.TIMEOUT)
            piece = os.read(pipe, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def close(self) -> None:
        """End it, and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _call_in(frame: bytes, until: float) -> str:
    """The call that a frame names. Raises `Failed` if such frames never end."""
    if time.monotonic() > until:  # guard: frames-of-calls-end
        raise Failed("it did not answer in time", Reason.TIMEOUT)
    return frame[len(CALL) :][:200].decode("utf-8", "replace")


def _ended(code: int | None) -> str:
    """How a process ended: by an exit code, or by the signal that a shell's code above 128 stands for."""
    number = -code if code is not None and code < 0 else (code or 0) - 128
    if number in set(signal.Signals):
        return f"it ended its process with the signal {signal.Signals(number).name}"
    return f"it ended its process with exit code {code}"


def importable() -> list[Path]:
    """Folders of installed packages: those of this interpreter, and what it found besides, but not the working folder."""
    found = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    found |= {Path(entry).absolute() for entry in sys.path if entry}
    own = {Path(sys.base_prefix).resolve(), Path.cwd(), Path(sys.executable).parent}
    standard = {Path(path) for path in standard_paths()}
    return sorted(path for path in found if path.is_dir() and path not in own and path not in standard)


def start(sandboxed: bool, hash_seed: int, zone: str, shown: Sequence[Path], dependencies: Sequence[Path]) -> Process:
    """Start a process. The sandbox shows it the paths in `shown`; it finds modules in `dependencies`, too."""
    return Sandboxed(hash_seed, zone, shown, dependencies) if sandboxed else WorkerProcess(hash_seed, zone)

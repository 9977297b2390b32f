"""Our end of the line to an environment in another process, with an answer to each request, and a new process after an end.

The process is a sandbox for a package, and a plain child for a file of this user. An answer that is too long, too late or
of another form ends it. This file does not deal with episodes.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.config.process_environment import SAME_EVERYWHERE, child_environment
from shoal.envs.isolated import messages as f
from shoal.errors import ShoalError, StateError, cause_of
from shoal.ipc import Child, ChildExited, spawn
from shoal.sandbox.cgroups import taken_bytes
from shoal.sandbox.filesystem import INTERPRETER_FLAGS, OUTSIDE, SandboxPath, interpreter, standard_paths
from shoal.sandbox.limits import NO_LIMIT, Limits
from shoal.sandbox.sandbox import Resident

LIMITS = Limits(wall_s=10.0, cpu_s=NO_LIMIT, memory_mb=3072, processes=64, open_files=256, scratch_mb=64, file_mb=64)
"""Limits of an environment. Honest answers take milliseconds. The largest packages that we know have 2 GB of address space
once they are imported. CPU time would count for the whole life, so only wall time limits an answer."""

OWN_LIMITS = replace(LIMITS, memory_mb=0)
"""Of a file of this user: time alone."""

OPEN_S = 120.0
"""Wall time to import the package and make its environment: as much as the host's env server gives."""

SLOW_OPEN_S = 10.0
"""An import that takes longer is told."""

MAX_FRAME_BYTES = f.MAX_ANSWER_BYTES + (64 << 10)
"""The inside keeps to MAX_ANSWER_BYTES, so a longer frame comes from the package's code."""

MAX_TOLD = 10
"""Number of different tracebacks that are shown."""

CODE = OUTSIDE / "code"
"""Where the sandbox shows our code, which environments import."""

OWN_FLAGS = ("-P", "-B", "-c")
"""No script's directory on `sys.path`, and no bytecode written beside the user's file."""

STACK_S, STACK_BYTES = 0.5, 1 << 16
"""How long a process that is to be ended may take to write where it is, and how much of that is read."""

_FRAME = re.compile(r'File "([^"\n]*)", line (\d+) in ([^\n]+)')
"""A line of a stack that `faulthandler` wrote, the deepest first."""

log = logging.getLogger("envs")
_encode = msgspec.msgpack.Encoder().encode
_first = msgspec.msgpack.Decoder(f.EnvFacts | f.EnvRefused).decode
_decode = msgspec.msgpack.Decoder(f.AnyAnswer).decode


class PackageSource(NamedTuple):
    """A package on this machine, which plays in the sandbox."""

    folder: Path
    """Its files."""
    dependencies: Path
    """The unpacked wheels of its lock."""
    file: str
    """The file below `folder` that makes the environment."""
    function: str
    args: Mapping[str, Any]
    title: str
    """Name and version, for people."""

    def start(self, limits: Limits) -> Child:
        """Start the sandbox. Raises `StateError`."""
        deps = self.dependencies
        shown = [
            SandboxPath(self.folder, PACKAGE),
            *([SandboxPath(deps, DEPENDENCIES)] if deps.is_dir() else []),
            *our_code(),
        ]
        program = [str(interpreter()), *INTERPRETER_FLAGS, "-c", PROGRAM, self.file, self.function, *PATHS]
        return Resident(program, limits, shown)

    @property
    def called(self) -> str:
        """What people call it."""
        return self.title

    def refused(self, why: str) -> str:
        """What to say if it does not load."""
        return f"{self.title} does not load inside the sandbox: {why}"


class OwnFile(NamedTuple):
    """An environment file of this user, which plays in a child process of ours."""

    path: Path
    function: str
    args: Mapping[str, Any]

    def start(self, limits: Limits) -> Child:
        """Start the child, whose memory nothing limits. Raises `StateError`."""
        return OwnProcess(OWN_PROGRAM, (str(self.path), self.function))

    @property
    def called(self) -> str:
        return str(self.path)

    def refused(self, why: str) -> str:
        return why if str(self.path) in why else f"cannot load environment {self.path}: {why}"


class StackFile:
    """Our end. The file is gone when this object is freed."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed when this object is freed
        self.descriptor = self._file.fileno()
        """What the process inherits."""

    def ask(self, process: "subprocess.Popen[bytes]") -> None:
        """Let a process that takes too long write where it is."""
        until, size = time.monotonic() + STACK_S, 0
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGUSR2)
            while time.monotonic() < until and not 0 < size == os.fstat(self.descriptor).st_size:
                size = os.fstat(self.descriptor).st_size
                time.sleep(0.02)

    def place(self, path: str) -> tuple[str, str]:
        """Where in a file its main thread was when a signal or a time limit ended it, as the end of a sentence, and within
        which method; empty if unknown."""
        stack = os.pread(self.descriptor, STACK_BYTES, 0).decode("utf-8", "replace")
        shown = path.encode("ascii", "backslashreplace").decode()  # as `faulthandler` writes it
        frames = [frame for frame in _FRAME.findall(stack) if frame[0] == shown]
        return (f", at {path} line {frames[0][1]}", frames[-1][2]) if frames else ("", "")


class OwnProcess(Child):
    """A child process of ours in which an environment of this user plays, with network, files and libraries: no sandbox.

    For environment files that a run's host wrote. One main thread plays, and a time limit ends it. It ends on `end()`, when
    this object is freed, and with the thread that started it.
    """

    def __init__(self, program: str, arguments: Sequence[str] = ()) -> None:
        """`program` is Python. Its arguments are our process id, the file for `stack`, `arguments`, and our `sys.path`.
        Raises `StateError`."""
        try:
            self.stack = StackFile()
            stack = self.stack.descriptor
            command = [sys.executable, *OWN_FLAGS, program, str(os.getpid()), str(stack), *arguments, *sys.path]
            super().__init__(spawn(command, child_environment(1) | SAME_EVERYWHERE, pass_fds=[stack]))
        except OSError as error:
            raise StateError(  # guard: no-process-fails-no-rollout
                f"cannot start a process for an environment ({cause_of(error)}): allow more processes or memory"
            ) from None

    def late(self) -> None:
        """Let the process write where it is."""
        self.stack.ask(self.process)


class EnvProcessExited(Exception):
    """The process was ended instead of answering; the text says why, as the end of a sentence."""

    def __init__(self, why: str, method: str = "") -> None:
        """`method`: which one of the environment was under way, if that is known."""
        super().__init__(why)
        self.method = method


class EnvConnection:
    """A running process with one environment in it, for one thread at a time."""

    def __init__(self, source: PackageSource | OwnFile, limits: Limits, tell: Callable[[str], None]) -> None:
        """Start it. `tell` gets each traceback of the environment, a text that may contain anything.

        Raises `ShoalError` if the environment does not load, `StateError` if the process does not start.
        """
        self._source, self._limits, self._tell = source, limits, tell
        self._running: Child | None = None
        self._drop: list[int] = []
        self._told: set[str] = set()
        """Tracebacks that were already shown."""
        try:
            self._running, self.facts = self._open()
        except EnvProcessExited as gone:
            raise ShoalError(source.refused(f"it {gone}")) from None

    def forget(self, state: int) -> None:
        """Say with the next request that nobody needs a state any more. Any thread may call it."""
        self._drop.append(state)

    def ask(
        self, kind: type[f.IsolatedRequest], fields: Mapping[str, Any], patience: float = 1.0
    ) -> tuple[f.AnyAnswer, bytes]:
        """The answer, and its bytes. Raises as `ask_all`."""
        return next(self.ask_all([(kind, fields)], patience))

    def ask_all(
        self, requests: Sequence[tuple[type[f.IsolatedRequest], Mapping[str, Any]]], patience: float = 1.0
    ) -> Iterator[tuple[f.AnyAnswer, bytes]]:
        """The answers to several requests, which are sent at once, and their bytes, as they come. Each has its own time.
        Raises `EnvProcessExited`; a later request then gets a new process, which keeps no states."""
        if self._running is None:
            self._running, facts = self._open()
            if facts != self.facts:
                self.end()
                raise EnvProcessExited("became another environment when it was started again")
        drop, self._drop = self._drop, []
        sent = [kind(drop if i == 0 else [], **fields) for i, (kind, fields) in enumerate(requests)]
        running, limit_s = self._running, patience * self._limits.wall_s
        for place, (kind, _) in enumerate(requests):
            try:
                if not place:
                    running.send(_encode(sent), limit_s)
                data = running.receive(limit_s, MAX_FRAME_BYTES)
                answer = running.decoded(data, _decode)
            except ChildExited as gone:
                where, method = self._place()
                self.end()
                raise EnvProcessExited(f"{gone}{where}", method) from None
            if isinstance(answer, f.EnvFault) and not (kind is f.Pose and answer.usual):
                self._show(answer.trace)
            yield answer, data

    def _show(self, trace: str) -> None:
        if trace not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(trace)
            self._tell(trace)

    def _open(self) -> tuple[Child, f.EnvFacts]:
        source = self._source
        running = source.start(self._limits)
        try:
            with log_if_slow(source.called, OPEN_S):
                opened = running.ask(_encode(source.args), OPEN_S, MAX_FRAME_BYTES)
            answer = running.decoded(opened, _first)
        except ChildExited as gone:
            raise EnvProcessExited(str(gone)) from None
        if isinstance(answer, f.EnvRefused):
            running.end()
            self._show(answer.trace)
            raise ShoalError(source.refused(answer.why))
        return running, answer

    def _place(self) -> tuple[str, str]:
        """Where in the file of this user its process was ended, and within which of its methods; empty if unknown."""
        if not isinstance(self._source, OwnFile) or not isinstance(self._running, OwnProcess):
            return "", ""
        return self._running.stack.place(str(self._source.path))

    def memory_bytes(self) -> int:
        """What the process takes now. Any thread may ask."""
        running = self._running  # its own thread may end it meanwhile
        return 0 if running is None else taken_bytes(running.pid)

    def kill(self) -> None:
        """End the process, from another thread: who waits for its answer then gets `EnvProcessExited`."""
        if (running := self._running) is not None:
            running.kill()

    def end(self) -> None:
        """End the process. The next request gets another one."""
        if self._running is not None:
            self._running.end()
            self._running = None


@contextlib.contextmanager
def log_if_slow(what: str, most_s: float) -> Iterator[None]:
    """Around the import of an environment, which is given up after `most_s`: log that it takes long, if it does."""
    timer = threading.Timer(
        SLOW_OPEN_S, log.warning,
        ("importing %s takes more than %.0f s, and is given up after %.0f s: unless this machine is just busy, let the "
         "file do less when it is imported and when it makes its environment", what, SLOW_OPEN_S, most_s),
    )  # fmt: skip
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


PACKAGE, DEPENDENCIES = OUTSIDE / "package", OUTSIDE / "dependencies"
"""Where every sandbox shows the package, so that no path differs between machines."""

PATHS = tuple(map(str, (PACKAGE, DEPENDENCIES, CODE, *standard_paths())))
PROGRAM = (
    "import sys; file, function = sys.argv[1:3]; sys.path[:] = sys.argv[3:]; sys.argv[1:] = []; "
    f"from shoal.envs.isolated.server import serve; serve({str(PACKAGE)!r} + '/' + file, function)"
)


OWN_PROGRAM = (
    "import sys; parent, stack, file, function = sys.argv[1:5]; sys.path[:] = sys.argv[5:]; sys.argv[1:] = []; "
    "from shoal.envs.isolated.server import serve_own; serve_own(int(parent), int(stack), file, function)"
)


def our_code() -> Sequence[SandboxPath]:
    """Our own code, and the one package that our end inside needs."""
    folders = Path(__file__).parents[2], Path(str(msgspec.__file__)).parent
    return [SandboxPath(folder, CODE / folder.name) for folder in folders]

"""Our end of the line to an environment in the sandbox: one request, one answer, and a new sandbox if one has ended.

Used by `client`. An answer that is too long, too late or of another form ends the sandbox. It does not deal with episodes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.envs.contained import frames as f
from shoal.errors import ShoalError
from shoal.sandbox.layout import INTERPRETER_FLAGS, OUTSIDE, Shown, interpreter, standard_paths
from shoal.sandbox.limits import NO_LIMIT, Ended, Limits, Outcome, Reason
from shoal.sandbox.resident import Resident

LIMITS = Limits(wall_s=10.0, cpu_s=NO_LIMIT, memory_mb=3072, processes=64, open_files=256, scratch_mb=64, file_mb=64)
"""Limits of an environment. Honest answers take milliseconds. The largest packages that we know have 2 GB of address space
once they are imported. CPU time would count for the whole life, so only wall time limits an answer."""

OPEN_S = 60.0
"""Wall time to import the package and make its environment."""

MAX_FRAME_BYTES = f.MAX_ANSWER_BYTES + (64 << 10)
"""The inside keeps to MAX_ANSWER_BYTES, so a longer frame comes from the package's code."""

MAX_TOLD = 10
"""Number of different tracebacks that are shown."""

CODE = OUTSIDE / "code"
"""Where the sandbox shows our code, which environments import."""

_encode = msgspec.msgpack.Encoder().encode
_first = msgspec.msgpack.Decoder(f.Facts | f.Refused).decode
_decode = msgspec.msgpack.Decoder(f.AnyAnswer).decode


class Source(NamedTuple):
    """A package on this machine."""

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


class Gone(Exception):
    """The sandbox was ended instead of answering; the text says why, as the end of a sentence."""


class Line:
    """A running sandbox with one package's environment in it."""

    def __init__(self, source: Source, limits: Limits, tell: Callable[[str], None]) -> None:
        """Start it. `tell` gets each traceback of the environment, a text that may contain anything.

        Raises `ShoalError` if the package does not load, `StateError` if the sandbox does not start.
        """
        self._source, self._limits, self._tell = source, limits, tell
        self._resident: Resident | None = None
        self._drop: list[int] = []
        self._told: set[str] = set()
        """Tracebacks that were already shown."""
        try:
            self._resident, self.facts = self._open()
        except Gone as gone:
            raise ShoalError(f"{source.title} does not load inside the sandbox: it {gone}") from None

    def forget(self, state: int) -> None:
        """Say with the next request that nobody needs a state any more. Any thread may call it."""
        self._drop.append(state)

    def ask(self, kind: type[f.Request], fields: Mapping[str, Any], patience: float = 1.0) -> tuple[f.AnyAnswer, bytes]:
        """The answer, and its bytes. Raises `Gone`; a later request then gets a new sandbox, which keeps no states."""
        if self._resident is None:
            self._resident, facts = self._open()
            if facts != self.facts:
                self.end()
                raise Gone("became another environment when it was started again")
        drop, self._drop = self._drop, []
        data = self._exchange(self._resident, _encode(kind(drop, **fields)), patience * self._limits.wall_s)
        try:
            answer = _decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            self.end()
            raise Gone("sent a malformed answer") from None  # guard: answers-of-an-environment
        if isinstance(answer, f.Fault) and not (kind is f.Pose and answer.usual):
            self._show(answer.trace)
        return answer, data

    def _show(self, trace: str) -> None:
        if trace not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(trace)
            self._tell(trace)

    def _open(self) -> tuple[Resident, f.Facts]:
        source, deps = self._source, self._source.dependencies
        shown = [Shown(source.folder, PACKAGE), *([Shown(deps, DEPENDENCIES)] if deps.is_dir() else []), *our_code()]
        program = [str(interpreter()), *INTERPRETER_FLAGS, "-c", PROGRAM, source.file, source.function, *PATHS]
        resident = Resident(program, self._limits, shown)
        try:
            answer = _first(self._exchange(resident, _encode(source.args), OPEN_S))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            resident.close()
            raise Gone("sent a malformed answer") from None
        if isinstance(answer, f.Refused):
            resident.close()
            self._show(answer.trace)
            raise ShoalError(f"{source.title} does not load inside the sandbox: {answer.why}")
        return resident, answer

    def _exchange(self, resident: Resident, request: bytes, limit_s: float) -> bytes:
        told = resident.ask(request, limit_s, MAX_FRAME_BYTES)
        if isinstance(told, bytes):
            return told
        self._resident = None
        raise Gone(gone_of(told, limit_s, self._limits))

    def end(self) -> None:
        """End the sandbox. The next request gets another one."""
        if self._resident is not None:
            self._resident.close()
            self._resident = None


PACKAGE, DEPENDENCIES = OUTSIDE / "package", OUTSIDE / "dependencies"
"""Where every sandbox shows the package, so that no path differs between machines."""

PATHS = tuple(map(str, (PACKAGE, DEPENDENCIES, CODE, *standard_paths())))
PROGRAM = (
    "import sys; file, function = sys.argv[1:3]; sys.path[:] = sys.argv[3:]; sys.argv[1:] = []; "
    f"from shoal.envs.contained.inside import serve; serve({str(PACKAGE)!r} + '/' + file, function)"
)


def our_code() -> Sequence[Shown]:
    """Our own code, and the one package that our end inside needs."""
    folders = Path(__file__).parents[2], Path(str(msgspec.__file__)).parent
    return [Shown(folder, CODE / folder.name) for folder in folders]


def gone_of(outcome: Outcome, limit_s: float, limits: Limits) -> str:
    """Why a sandbox was ended, as the end of a sentence."""
    if isinstance(outcome, Ended):
        return f"ended by itself, with exit code {outcome.exit_code}"
    if outcome.reason is Reason.TIMEOUT:
        return f"took longer than {limit_s:g} s"
    if outcome.reason is Reason.MEMORY:
        return f"took more than {limits.memory_mb} MB of memory"
    return "was ended by something else than its limits"

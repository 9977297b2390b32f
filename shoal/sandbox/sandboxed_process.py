"""A foreign program that stays in a sandbox and answers one request after another.

Requests and answers are frames (4 bytes of length, big-endian, then the bytes) on the program's standard input and output.
The caller and the program agree on what the bytes mean.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from shoal.sandbox.filesystem import SandboxPath
from shoal.sandbox.limits import Limits, Outcome, Reason, Stopped
from shoal.sandbox.sandbox import Sandbox, SandboxExited
from shoal.sandbox.usage import taken_bytes

MAX_ANSWER_BYTES = 4 << 20
"""Far more than the longest text that an environment may write."""


class Resident:
    """One running program. It ends on `close()`, when this object is freed, and when this process ends."""

    def __init__(
        self, program: Sequence[str], limits: Limits = Limits(), packages: Sequence[Path | SandboxPath] = (),
    ) -> None:  # fmt: skip
        """`program` is a command, with `interpreter()` as its first word; `packages` are paths that it may read, each
        at `outside(path)` or at the place named.

        `limits.memory_mb` includes the interpreter. `limits.cpu_s` is for the program's whole life. A program that
        catches its own `MemoryError` reports it by sending itself the signal SIGRTMAX. Raises `StateError`.
        """
        self.limits = limits
        self._cell = Sandbox(limits, {"kind": "resident", "program": list(program)}, packages)
        self._ended: Outcome | None = None

    def ask(self, request: bytes, limit_s: float = 0.0, most_bytes: int = MAX_ANSWER_BYTES) -> bytes | Outcome:
        """The answer within `limit_s` (0: `limits.wall_s`), or how the program ended. An ended program stays ended."""
        return ask_all([self], [request], limit_s, most_bytes)[0]

    def next(self, limit_s: float, most_bytes: int = MAX_ANSWER_BYTES) -> bytes | Outcome:
        """One more answer to the last request, of a program that sends several. As `ask`."""
        if self._ended is None:
            try:
                return self._cell.receive(time.monotonic() + limit_s, most_bytes)
            except SandboxExited as gone:
                self._ended = gone.outcome
        return self._ended

    def memory_bytes(self) -> int:
        """What the program and all that it started take now."""
        return taken_bytes(self._cell.init)

    def kill(self) -> None:
        """End the program, from any thread: an `ask` that waits for its answer returns. `close` is due nevertheless."""
        self._cell.kill()

    def close(self) -> None:
        self._ended = self._ended or Stopped(Reason.KILLED)
        self._cell.end()


def ask_all(
    residents: Sequence[Resident], requests: Sequence[bytes], limit_s: float = 0.0, most_bytes: int = MAX_ANSWER_BYTES
) -> list[bytes | Outcome]:
    """One request to each. They work at the same time, and one that fails does not delay the answers of the others."""
    for resident, request in zip(residents, requests, strict=True):
        if resident._ended is None:
            try:
                resident._cell.send(request)
            except SandboxExited as gone:
                resident._ended = gone.outcome
    asked_s = time.monotonic()
    answers: list[bytes | Outcome] = []
    for resident in residents:
        if resident._ended is None:
            try:
                answers.append(resident._cell.receive(asked_s + (limit_s or resident.limits.wall_s), most_bytes))
                continue
            except SandboxExited as gone:
                resident._ended = gone.outcome
        answers.append(resident._ended)
    return answers

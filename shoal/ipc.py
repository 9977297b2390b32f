"""Messages to a child process and back: their framing, deadlines and caps, and why a child gave no answer.

A message is a length in 4 bytes, big-endian, then that many bytes. A child reads requests from its standard input, and
writes answers to its standard output. `sandbox/init` has a copy of the child's end, because it imports nothing of ours.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

LOOK_S, LONGEST_WAIT_S = 0.05, 60.0
"""Time between two looks at a child that is being waited for, with and without something to look at."""

DRIP_S = 1.0
"""What has come at the deadline may take so long to be read. A child could send byte after byte for ever."""

OUT_OF_MEMORY = signal.SIGRTMAX if sys.platform == "linux" else signal.SIGUSR1
"""A child that finds no memory ends itself by this signal."""

_PIECE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


class Reason(Enum):
    """Why a child was ended, or a program in the sandbox."""

    TIMEOUT = "timeout"
    """It reached its limit of time."""
    MEMORY = "memory"
    """It reached its limit of memory."""
    LONG = "answer"
    """It began an answer that is longer than its reader takes."""
    WRONG = "wrong"
    """Its answer has another form, or it closed its pipe and went on."""
    KILLED = "killed"
    """Something else ended it or its sandbox."""


class ChildExited(Exception):
    """A child gave no answer, and has ended. The text says why, as the end of a sentence about it."""

    def __init__(self, reason: Reason | None, why: str, code: int | None = None) -> None:
        """`reason` is None if the child ended by itself, with `code`, which is negative for a signal."""
        super().__init__(why)
        self.reason, self.code = reason, code


class Child:
    """A running child, for one thread at a time; any thread may `kill` it. It ends when this object is freed.

    A child that gives no answer in time, or a wrong one, is ended at once: what it sends later would be taken for the
    answer to another request.
    """

    look_s = LONGEST_WAIT_S

    def __init__(self, process: "subprocess.Popen[bytes]", ending: Callable[[], None] | None = None) -> None:
        """`ending` ends the child, where `end` is not enough."""
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._watch: Callable[[], None] | None = None
        self._to, self._from = process.stdin.fileno(), process.stdout.fileno()
        self._come = bytearray()
        """Bytes that came with those that were asked for."""
        self._gone: ChildExited | None = None
        os.set_blocking(self._to, False)
        self._readable, self._writable = select.poll(), select.poll()  # `select.select` fails above descriptor 1023
        self._readable.register(self._from, select.POLLIN)
        self._writable.register(self._to, select.POLLOUT)
        self.end = weakref.finalize(self, ending or partial(end, process))

    @property
    def pid(self) -> int:
        return self.process.pid

    def watch(self, look: Callable[[], None]) -> None:
        """From now on, call `look` from time to time while we wait. What it raises ends the child."""
        self._watch, self.look_s = look, LOOK_S

    def ask(self, request: bytes, limit_s: float, most_bytes: int) -> bytes:
        """The answer to a request. Raises `ChildExited`, and what is raised by a `look` that `watch` was given."""
        with self._within(limit_s) as until:
            self._send(request, until)
            return self._receive(until, most_bytes)

    def send(self, data: bytes, limit_s: float) -> None:
        """Send a message. Raises as `ask`."""
        with self._within(limit_s) as until:
            self._send(data, until)

    def receive(self, limit_s: float, most_bytes: int) -> bytes:
        """The next message. Raises as `ask`."""
        with self._within(limit_s) as until:
            return self._receive(until, most_bytes)

    def decoded(self, data: bytes, decode: Callable[[bytes], T]) -> T:
        """An answer as `decode` reads it. Raises `ChildExited` if it has another form."""
        try:
            return decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            gone = ChildExited(Reason.WRONG, f"gave a wrong answer ({' '.join(str(error).split())[:200]})")
            self._give_up(gone)  # guard: answers-have-their-form

    def kill(self) -> None:
        """End the child, from any thread: an `ask` that waits for its answer raises. `end` is due nevertheless."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        """Of a child that has closed its pipe; negative for a signal, None if it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return self.process.returncode

    def look(self) -> None:
        """Called every `look_s` while we wait."""
        if self._watch is not None:
            self._watch()

    def late(self) -> None:
        """Called before a child that takes too long is ended."""

    def closed(self) -> ChildExited:
        """Why the child closed its pipe."""
        code = self.exit_code()
        if code is None:
            return ChildExited(Reason.WRONG, "closed its pipe")
        if code == -OUT_OF_MEMORY:
            return ChildExited(Reason.MEMORY, "found no memory left")
        return ChildExited(None, how_ended(code), code)

    @contextlib.contextmanager
    def _within(self, limit_s: float) -> Iterator[float]:
        """Until when to send or receive. What goes wrong ends the child, and an ended child stays ended."""
        if self._gone is not None or not self.end.alive:
            gone = self._gone or ChildExited(Reason.KILLED, "was ended")
            raise ChildExited(gone.reason, str(gone), gone.code)
        with contextlib.ExitStack() as failed:
            failed.callback(self.end)  # whatever is raised meanwhile: a message may be half read
            try:
                yield time.monotonic() + limit_s
            except _Late:
                self.late()
                self._give_up(ChildExited(Reason.TIMEOUT, f"took longer than {limit_s:g} s"))
            except ChildExited as gone:
                self._give_up(gone)
            except (EOFError, OSError):
                self._give_up(self.closed())
            failed.pop_all()

    def _give_up(self, gone: ChildExited) -> NoReturn:
        self._gone = gone
        self.end()
        raise gone from None

    def _send(self, data: bytes, until: float) -> None:
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            self._wait(self._writable, until)  # guard: child-that-does-not-read
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._to, rest[:_PIECE_BYTES]) :]

    def _receive(self, until: float, most_bytes: int) -> bytes:
        size = int.from_bytes(self._read(4, until), "big")
        if size > most_bytes:  # guard: answers-are-capped
            raise ChildExited(Reason.LONG, f"answered with {size} bytes, limit {most_bytes}")
        return self._read(size, until)

    def _read(self, size: int, until: float) -> bytes:
        while len(self._come) < size:
            self._wait(self._readable, until)
            piece = os.read(self._from, min(max(size - len(self._come), _PIECE_BYTES), 1 << 20))
            if not piece:
                raise EOFError
            self._come += piece
        data = bytes(self._come[:size])
        del self._come[:size]
        return data

    def _wait(self, ready: "select.poll", until: float) -> None:
        while not ready.poll(1000 * max(0.0, min(self.look_s, until - time.monotonic()))):
            if time.monotonic() >= until:  # guard: answers-have-a-deadline
                raise _Late
            self.look()
        if time.monotonic() >= until + DRIP_S:  # guard: drops-are-late-too
            raise _Late


class _Late(Exception):
    """The deadline has passed."""


def spawn(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a child in a session of its own, with pipes as standard input and output. Raises `OSError`."""
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0, env=env, pass_fds=pass_fds,
        start_new_session=True,
    )  # fmt: skip


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a child, and what it has started in its session. Wait for it, and close its pipes."""
    with contextlib.suppress(OSError):  # it leads no session, or nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)  # guard: children-of-a-child
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def how_ended(code: int) -> str:
    """How a process ended, as the end of a sentence."""
    if code >= 0:
        return f"ended by itself, with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    why = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{name}{why}"


# --- the child's end ---


def take_pipes(prints_to: int | None = None) -> tuple[int, int]:
    """Descriptors of the requests and the answers. From now on, standard input is empty, and what is printed goes to the
    descriptor `prints_to`, or nowhere."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing if prints_to is None else prints_to, 1)  # guard: libraries-print-no-answer
    os.close(nothing)
    return requests, answers


def read_message(pipe: int) -> bytes | None:
    """The next request; None when the other end has closed, or was killed while it sent."""
    start = _read_all(pipe, 4)
    return None if start is None else _read_all(pipe, int.from_bytes(start, "big"))


def _read_all(pipe: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(pipe, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def write_message(pipe: int, data: bytes) -> None:
    """Send an answer. It may take any time."""
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def end_with(parent: int) -> None:
    """Let the system end this process, whatever it does, when the thread that started it ends. Only Linux can.

    `parent` is the process id of that thread's process.
    """
    import ctypes  # a sandbox does without it

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # guard: child-ends-with-its-parent
        if os.getppid() != parent:  # it had ended before
            os._exit(0)

"""Requests and answers over the pipes of a child process: within a deadline at our end, and what the child's end needs.

A frame is a length in 4 bytes, big-endian, then that many bytes. This file does not know what is in a frame, or how a child
is started.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO

LOOK_S, LONGEST_WAIT_S = 0.05, 60.0
"""Time between two looks at a child that is being waited for, with and without something to look at."""

_PIECE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class Late(Exception):
    """The deadline has passed."""


class Pipes:
    """Our ends of a child's pipes, for one thread at a time. The child ends when this object is freed."""

    def __init__(self, process: "subprocess.Popen[bytes]", look: Callable[[], None] | None = None) -> None:
        """`look` is called from time to time while we wait. What it raises ends the waiting."""
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from, self._look = process.stdin.fileno(), process.stdout.fileno(), look
        self._come = bytearray()
        """Bytes that came with those that were asked for."""
        os.set_blocking(self._to, False)
        self._readable, self._writable = select.poll(), select.poll()  # `select.select` fails above descriptor 1023
        self._readable.register(self._from, select.POLLIN)
        self._writable.register(self._to, select.POLLOUT)
        self.end = weakref.finalize(self, end, process)

    def send(self, data: bytes, until: float) -> None:
        """Send a frame. Raises `Late` after `until`, on the clock of `time.monotonic`, and `OSError` if nobody reads."""
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            self._wait(self._writable, until)  # guard: child-that-does-not-read
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._to, rest[:_PIECE_BYTES]) :]

    def size(self, until: float) -> int:
        """How large the next frame is, which the caller may refuse. Raises as `read`."""
        return int.from_bytes(self.read(4, until), "big")

    def read(self, size: int, until: float) -> bytes:
        """The next bytes. Raises `Late`, and `EOFError` if the child has closed its pipe."""
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
        most_s = LONGEST_WAIT_S if self._look is None else LOOK_S
        while not ready.poll(1000 * max(0.0, min(most_s, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise Late
            if self._look is not None:
                self._look()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a child, and what it has started in its session. Wait for it, and close its pipes."""
    with contextlib.suppress(OSError):  # it leads no session, or nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)  # guard: children-of-a-child
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


# --- the child's end ---


def next_frame(pipe: BinaryIO) -> bytes | None:
    """The next request; None when our end has closed, or was killed while it sent."""
    if len(start := pipe.read(4)) < 4:
        return None
    size = int.from_bytes(start, "big")
    data = pipe.read(size)
    return data if len(data) == size else None


def write_frame(pipe: int, data: bytes) -> None:
    """Send an answer. It may take any time."""
    rest = memoryview(len(data).to_bytes(4, "big") + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def end_with(parent: int) -> None:
    """Let the system end this process, whatever it does, when the thread that started it ends. Only Linux can.

    `parent` is the process id of that thread's process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # guard: child-ends-with-its-parent
        if os.getppid() != parent:  # it had ended before
            os._exit(0)

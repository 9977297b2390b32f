"""Where in an environment's file its process hung or crashed: a file that the process writes, and that our end reads.

It ends no process.
"""

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import tempfile
import time

STACK_S, STACK_BYTES = 0.5, 1 << 16
"""How long a process that is to be ended may take to write where it is, and how much of that is read."""

_FRAME = re.compile(r'File "([^"\n]*)", line (\d+) in ([^\n]+)')
"""A line of a stack that `faulthandler` wrote, the deepest first."""


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


def write_stacks(descriptor: int) -> None:
    """In the process: from now on, where it is goes to this descriptor when it crashes, when an alarm that it set itself
    ends it, and at SIGUSR2, which our end sends before it ends a call that takes long."""
    faulthandler.enable(descriptor, all_threads=False)
    faulthandler.register(signal.SIGUSR2, descriptor, all_threads=False)
    faulthandler.register(signal.SIGALRM, descriptor, all_threads=False, chain=True)

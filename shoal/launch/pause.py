"""Pausing a worker of this machine: `shoal node pause` and `resume`, and the signals that they send.

The worker's folder names its process. A worker has the handlers before its name is in the folder, so no signal ends it.
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from shoal.errors import StateError, cause_of

WORKER = "worker"
SIGNALS = {"pause": signal.SIGUSR1, "resume": signal.SIGUSR2}


@contextlib.contextmanager
def on_pause_signals(pause: Callable[[], None], resume: Callable[[], None]) -> Iterator[None]:
    """Call these at SIGUSR1 and SIGUSR2."""

    def act(number: int, frame: FrameType | None) -> None:
        (pause if number == SIGNALS["pause"] else resume)()

    before = {number: signal.signal(number, act) for number in SIGNALS.values()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def name_worker(lock_fd: int) -> None:
    """Write into a node's locked folder that its process is a worker, which can be paused."""
    os.pwrite(lock_fd, f"{os.getpid()} {WORKER}".encode(), 0)


def signal_worker(home: Path, action: str) -> str:
    """Pause or resume the worker that uses this folder; returns what to tell the user. Raises `StateError`."""
    try:
        fd = os.open(home / ".lock", os.O_RDWR)
    except OSError as error:
        raise StateError(
            f"no node has used {home} ({cause_of(error)}): give the folder of its key with --home"
        ) from None
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise StateError(
                f"no node works from {home} now: start it with `shoal join`, or give its folder with --home"
            )
        words = os.pread(fd, 64, 0).decode(errors="replace").split()
    finally:
        os.close(fd)
    if len(words) != 2 or words[1] != WORKER or not words[0].isdecimal():  # guard: only-workers-are-signalled
        raise StateError(
            f"the process that uses {home} cannot be paused, because it is not a worker: give a worker's folder with --home"
        )
    try:
        os.kill(int(words[0]), SIGNALS[action])
    except OSError as error:
        raise StateError(f"process {words[0]} cannot be told: {cause_of(error)}") from None
    if action == "pause":
        return f"The worker in {home} (process {words[0]}) finishes what it holds, then takes no lease until you resume it."
    return f"The worker in {home} (process {words[0]}) takes leases again."

"""A queue of processes before one thing that only one of them can have: the first in it has it, and the dead leave it.

Called by `shifts`. Each place is a file with a number, in a folder that all the processes know. Its process holds a kernel
lock on it, so a process that is killed at any moment has left, and nothing must be repaired. Nobody is served out of order:
a lock alone would go to any of those that wait, and could keep one of them waiting for ever.

    shifts/cuda/00000017.trainer        the process that has it: the lowest number whose file is locked
    shifts/cuda/00000018.validator-0    waits since the file was made

It knows nothing of devices.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.errors import StateError, cause_of

_DOOR, _NEW = ".door", ".new-"


class Place(NamedTuple):
    """A place in the queue."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        """Of the process."""
        return self.path.name.partition(".")[2]

    def is_taken(self) -> bool:
        """Whether its process lives and has not left."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)


class Queue:
    """One process's place in a queue, or none. Not for several threads at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name` is what others are told of this process."""
        self._folder, self._name = folder, name
        self._own: Place | None = None
        self._fd = -1

    @property
    def is_in(self) -> bool:
        """Whether this process has a place."""
        return self._own is not None

    def enter(self) -> None:
        """Take the last place. Raises `StateError` if the folder cannot be written."""
        assert self._own is None, "this process is in the queue"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._door():
                self._clear()
                number = 1 + max((place.number for place in self._places()), default=0)
                self._own, self._fd = self._locked(number)
        except OSError as error:
            raise StateError(
                f"cannot write to {self._folder}, where the run's processes queue for a device: {cause_of(error)}. Free "
                "some space, or start with --set host.shifts=off"
            ) from None

    def leave(self) -> None:
        """Give the place up, if there is one."""
        if self._own is not None:
            self._own.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._own, self._fd = None, -1

    def before(self) -> list[str]:
        """The processes that come first, by name; none: it is this one's turn."""
        assert self._own is not None, "this process is not in the queue"
        return [place.name for place in self._places() if place.number < self._own.number and place.is_taken()]

    def is_followed(self) -> bool:
        """Whether another process waits behind this one."""
        assert self._own is not None, "this process is not in the queue"
        return any(place.number > self._own.number and place.is_taken() for place in self._places())

    def _places(self) -> list[Place]:
        """All places in their order, those of the dead among them."""
        named = [(path.name.partition(".")[0], path) for path in self._folder.iterdir()]
        return sorted(Place(int(number), path) for number, path in named if number.isdecimal())

    def _locked(self, number: int) -> tuple[Place, int]:
        """A new place with its lock. It is named when it is locked, so that nobody takes it for one of the dead."""
        scratch = self._folder / f"{_NEW}{os.getpid()}"
        fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            place = Place(number, self._folder / f"{number:08d}.{self._name}")
            scratch.rename(place.path)
        except OSError:
            os.close(fd)
            raise
        return place, fd

    def _clear(self) -> None:
        """Delete what the dead left. Only behind the door: a place that is made meanwhile could have the same name."""
        for path in self._folder.glob(f"{_NEW}*"):
            path.unlink(missing_ok=True)
        for place in self._places():
            if not place.is_taken():
                place.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _door(self) -> Iterator[None]:
        """One process at a time makes a place."""
        fd = os.open(self._folder / _DOOR, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

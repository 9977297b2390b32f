"""The queue for a device: processes of one machine that take turns with its memory."""

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from shoal.errors import StateError, cause_of

if TYPE_CHECKING:
    from shoal.roles.node.session import Session


# --- A queue of processes before one thing that only one of them can have ---
#
# The first in it has it, and the dead leave it.
#
# Each place is a file with a number, in a folder that all the processes know. Its process holds a kernel lock on it, so a
# process that is killed at any moment has left, and nothing must be repaired. Nobody is served out of order: a lock alone
# would go to any of those that wait, and could keep one of them waiting for ever.
#
#       shifts/cuda/00000017.trainer        the process that has it: the lowest number whose file is locked
#       shifts/cuda/00000018.validator-0    waits since the file was made


_LOCK, _NEW = ".door", ".new-"


class QueueTicket(NamedTuple):
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
        self._own: QueueTicket | None = None
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
            with self._context():
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

    def _places(self) -> list[QueueTicket]:
        """All places in their order, those of the dead among them."""
        named = [(path.name.partition(".")[0], path) for path in self._folder.iterdir()]
        return sorted(QueueTicket(int(number), path) for number, path in named if number.isdecimal())

    def _locked(self, number: int) -> tuple[QueueTicket, int]:
        """A new place with its lock. It is named when it is locked, so that nobody takes it for one of the dead."""
        scratch = self._folder / f"{_NEW}{os.getpid()}"
        fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            place = QueueTicket(number, self._folder / f"{number:08d}.{self._name}")
            scratch.rename(place.path)
        except OSError:
            os.close(fd)
            raise
        return place, fd

    def _clear(self) -> None:
        """Delete what the dead left. Only with the lock: a place that is made meanwhile could have the same name."""
        for path in self._folder.glob(f"{_NEW}*"):
            path.unlink(missing_ok=True)
        for place in self._places():
            if not place.is_taken():
                place.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """One process at a time makes a place."""
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


# --- Shifts ---
#
# Processes of one run that compute on one device have its memory one after another.
#
# Each works with `on`: it waits for its shift, and what it keeps on the device comes back from the memory of the CPU,
# with the same bits. After the work it stays there until another process waits. So a lone process never moves its
# tensors, a process without work holds nobody up, and one with much work hands over when its work is done:
#
#       trainer     work | park |  ...waits...  | come back | work ...
#       validator   ...waits... | come back | work | park |
#
# Why shifts, and not one process with one base in memory: trainer and validator have other precisions, layouts and
# versions of a policy, and a crash of one must not end the other. A shift costs one copy of the weights to the CPU and
# one back, seconds beside the minutes of a step.
#
# Nothing is decided by time, and the same work gives the same bits.


log = logging.getLogger("shifts")

POLL_S = 0.05
"""How often a process that waits looks whether it is first, and one without work whether others wait."""


class Parkable(Protocol):
    """What a process keeps on the device. Both calls may come from any thread, one at a time, while nothing computes."""

    def park(self) -> None:
        """Leave the device's memory."""

    def come_back(self) -> None:
        """Be there again, with the same bits."""


def is_parkable(thing: object) -> TypeGuard[Parkable]:
    """Whether a thing, or the one that a wrapper passes on to, can leave the device."""
    return hasattr(thing, "park") and hasattr(thing, "come_back")


def shift_of(folder: Path | None, name: str) -> "Shift":
    """The shifts of a process, among those that queue in a folder; without one, it has the device to itself."""
    return Shift() if folder is None else SharedDevice(Queue(folder, name))


async def load_on_shift(
    session: "Session", shift: "Shift", work: contextlib.AsyncExitStack, version: int, *, keep: int = 2, **how: Any
) -> None:
    """Fetch a version, begin a shift, and load the version. The shift ends with `work`; the rest is as of
    `Session.load`."""
    if session.engine.version != version:
        await session.bring(version, keep=keep, **how)  # while others have the device
    await work.enter_async_context(shift.on())
    await session.load(version, keep=keep, **how)


class Shift:
    """A process's right to compute on its device: here, of the only process on it."""

    def keeps(self, thing: object) -> None:
        """From now on, this leaves the device between shifts. It must be a `Parkable` if the device is shared."""

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """Within it, the device is this process's. Works that are at it at one time share the shift. Not to be nested."""
        yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The same for code without an event loop."""
        yield

    def pause(self) -> None:
        """Between two parts of one work within `held` or `on`: if others wait, let all of them go first."""


class SharedDevice(Shift):
    """One of several processes."""

    def __init__(
        self, queue: Queue, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._queue, self._clock, self._sleep = queue, clock, sleep
        self._parkables: list[Parkable] = []
        self._lock = threading.Lock()
        """Held while anything below changes, and while something is parked or comes back."""
        self._works = 0
        """How many are at work."""
        self._is_here = False
        """Whether the device is this process's. It may be without work."""
        self._asked: float | None = None
        """Since when it waits."""
        self._idle = threading.Event()
        self._watcher: threading.Thread | None = None

    def keeps(self, thing: object) -> None:
        assert is_parkable(thing), f"{type(thing).__name__} cannot leave a device"
        self._parkables.append(thing)

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        while not await self._begun():
            try:
                await asyncio.sleep(POLL_S)
            except asyncio.CancelledError:
                self._withdraw()
                raise
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._wait()
        try:
            yield
        finally:
            self._end()

    def pause(self) -> None:
        with self._lock:
            if self._works > 1 or not self._queue.is_followed():
                return
            self._works = 0
            self._give_up()
        try:
            self._wait()
        except BaseException:
            self._works = 1  # guard: failed-pause-ends-once
            raise

    def _wait(self) -> None:
        while not self._begin():
            self._sleep(POLL_S)

    async def _begun(self) -> bool:
        """`_begin` in a thread: to come back takes seconds."""
        work = asyncio.ensure_future(asyncio.to_thread(self._begin))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if await work:  # guard: shift-of-the-cancelled
                self._end()
            self._withdraw()
            raise

    def _begin(self) -> bool:
        """Begin a work if it is this process's shift, or else queue. Returns whether it began."""
        with self._lock:
            if self._is_here and not self._queue.is_followed():
                self._idle.clear()
                self._works += 1
                return True
            if self._is_here and self._works:  # guard: works-that-join-let-others-go-first
                return False
            if self._is_here:  # guard: idle-holder-queues-again
                self._give_up()
            if not self._queue.is_in:
                self._queue.enter()
            if before := self._queue.before():
                if self._asked is None:
                    self._asked = self._clock()
                    log.info("waits for the device behind=%s", ",".join(before))
                return False
            for parkable in self._parkables:
                parkable.come_back()
            if self._asked is not None:
                log.info("has the device after=%.1fs", self._clock() - self._asked)
            self._asked, self._is_here, self._works = None, True, 1
            return True

    def _end(self) -> None:
        """Stay until another process waits."""
        with self._lock:
            self._works -= 1
            if self._works:
                return
            self._idle.set()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="shifts", daemon=True)
                self._watcher.start()

    def _withdraw(self) -> None:
        """Wait no longer."""
        with self._lock:
            if not self._is_here:
                self._queue.leave()
                self._asked = None

    def _give_up(self) -> None:
        """Leave the device to the next. The lock is held."""
        for parkable in self._parkables:
            parkable.park()
        self._is_here = False
        self._idle.clear()
        self._queue.leave()

    def _watch(self) -> None:
        """Without work, make room for others as soon as one waits."""
        while True:
            self._idle.wait()
            with self._lock:
                if self._is_here and not self._works and self._queue.is_followed():
                    try:
                        self._give_up()
                    except Exception as error:  # noqa: BLE001
                        # Others would wait for ever. What is torn in memory is whole on the disk.
                        log.error("cannot leave the device, so this process ends: %s", cause_of(error))
                        os._exit(1)
            time.sleep(POLL_S)

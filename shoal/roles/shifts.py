"""Shifts: processes of one run that compute on one device have its memory one after another.

Called by trainer, validator, worker and evaluation of a host whose device cannot hold them all at once, which
`launch/fits` decides. Each works with `on`: it waits for its shift, and what it keeps on the device comes back from the
memory of the CPU, with the same bits. After the work it stays there until another process waits. So a lone process never
moves its tensors, a process without work holds nobody up, and one with much work hands over when its work is done:

    trainer     work | park |  ...waits...  | come back | work ...
    validator   ...waits... | come back | work | park |

Why shifts, and not one process with one base in memory: trainer and validator have other precisions, layouts and
versions of a policy, and a crash of one must not end the other. A shift costs one copy of the weights to the CPU and one
back, seconds beside the minutes of a step.

It knows neither torch nor what is parked. Nothing is decided by time, and the same work gives the same bits.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from shoal.errors import cause_of
from shoal.roles.queue import Queue

if TYPE_CHECKING:
    from shoal.roles.seat import Seat

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


class Shift(Protocol):
    """A process's right to compute on its device."""

    def keeps(self, thing: object) -> None:
        """From now on, this leaves the device between shifts. It must be a `Parkable` if the device is shared."""

    def on(self) -> AbstractAsyncContextManager[None]:
        """Within it, the device is this process's. Works that are at it at one time share the shift. Not to be nested."""

    def held(self) -> AbstractContextManager[None]:
        """The same for code without an event loop."""

    def pause(self) -> None:
        """Between two parts of one work within `held` or `on`: if others wait, let all of them go first."""


def shift_of(folder: Path | None, name: str) -> Shift:
    """The shifts of a process, among those that queue in a folder; without one, it has the device to itself."""
    return Alone() if folder is None else Shared(Queue(folder, name))


async def load_on_shift(
    seat: "Seat", shift: Shift, work: contextlib.AsyncExitStack, version: int, *, keep: int = 2, **how: Any
) -> None:
    """Fetch a version, begin a shift, and load the version. The shift ends with `work`; the rest is as of `Seat.load`."""
    if seat.engine.version != version:
        await seat.bring(version, keep=keep, **how)  # while others have the device
    await work.enter_async_context(shift.on())
    await seat.load(version, keep=keep, **how)


class Alone:
    """The only process on its device."""

    def keeps(self, thing: object) -> None:
        """See `Shift`."""

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """See `Shift`."""
        yield

    def held(self) -> AbstractContextManager[None]:
        """See `Shift`."""
        return contextlib.nullcontext()

    def pause(self) -> None:
        """See `Shift`."""


class Shared:
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
        """See `Shift`."""
        assert is_parkable(thing), f"{type(thing).__name__} cannot leave a device"
        self._parkables.append(thing)

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """See `Shift`."""
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
        """See `Shift`."""
        self._wait()
        try:
            yield
        finally:
            self._end()

    def pause(self) -> None:
        """See `Shift`."""
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

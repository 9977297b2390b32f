"""Clean stops: the first signal lets a role finish its work, the second ends the process at once.

Called by the roles that talk to a coordinator. It is an event, and a way to wait that ends early. It does not depend on
any role.
"""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("shoal")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

ONE_STOP_S = 0.5
"""Signals this soon after the first belong to the same stop: a terminal, a shell and a supervisor may each send one."""


class Stopping:
    """Whether this process has been told to stop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Tell the process to stop, as a signal would."""
        self._event.set()

    async def wait(self) -> None:
        """Until told to stop."""
        await self._event.wait()

    async def unless(self, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
        """The result of `work`. If told to stop first, cancel `work` after `grace_s`, and return None."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=grace_s)
            return task.result() if task.done() else None
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    @contextlib.contextmanager
    def at_signals(self) -> Iterator[None]:
        """Stop at the first SIGINT or SIGTERM. The next one ends the process at once, if it comes after `ONE_STOP_S`.

        The system ends it: an exception would wait until the threads of the event loop have finished their work.
        """
        loop = asyncio.get_running_loop()

        begun: list[asyncio.TimerHandle] = []

        def first(number: int) -> None:
            if begun:
                return
            log.info("stopping after the work in hand (%s; once more to stop at once)", signal.Signals(number).name)
            self.set()
            begun.append(loop.call_later(ONE_STOP_S, next_one_ends))  # guard: one-stop-of-two-signals

        def next_one_ends() -> None:
            for each in SIGNALS:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)  # guard: second-signal-ends

        for number in SIGNALS:
            loop.add_signal_handler(number, first, number)
        try:
            yield
        finally:
            for timer in begun:
                timer.cancel()
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """For work without an event loop: gives a function that says whether SIGINT or SIGTERM came. The next one, if it comes
    after `ONE_STOP_S`, raises KeyboardInterrupt at once. Outside the main thread, which alone gets signals, it says no."""
    first_s: float | None = None

    def on_signal(number: int, frame: object) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = time.monotonic()
            log.info("stopping after the work in hand (%s; once more to stop at once)", signal.Signals(number).name)
        elif time.monotonic() - first_s > ONE_STOP_S:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield lambda: first_s is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

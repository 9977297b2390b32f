"""A server process: its address file, its port, and the signals that stop it."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.errors import StateError, cause_of
from shoal.run_folder import write_atomically

# --- Listening sockets of roles that serve, and the files of a run's folder that say where they listen ---


class Address(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a process listens, as it writes it into a file of the run's folder."""

    url: str = ""
    pid: int = 0
    port: int = 0
    folder: tuple[int, int] | None = None
    """Device and inode of the run's folder: they stay when it is moved, and a copy has others."""


def tell_address(file: Path, port: int, url: str = "") -> None:
    """Write that this process listens at a port."""
    write_atomically(file, msgspec.json.encode(Address(url, os.getpid(), port, _identity(file.parent))))


def told_address(file: Path, of_copies: bool = False) -> Address:
    """What a process wrote so; empty if none did, or, unless `of_copies`, if the folder is a copy of where it wrote."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(file.read_bytes(), type=Address)
        if of_copies or found.folder in (None, _identity(file.parent)):  # guard: copy-is-not-hosted
            return found
    return Address()


def _identity(folder: Path) -> tuple[int, int]:
    return folder.stat().st_dev, folder.stat().st_ino


def port_of_last_start(file: Path, others: Container[int] = ()) -> int:
    """The port of the process that started last; 0 if none did, or if it is one of `others`, now those of other roles."""
    port = told_address(file, of_copies=True).port
    return 0 if port in others else port


def port_of_living(file: Path) -> int:
    """The same, if the process that wrote the file lives."""
    return told_address(file).port if living_pid(file) else 0


def living_pid(file: Path) -> int:
    """The process that wrote such a file; 0 if it has ended, or wrote none."""
    with contextlib.suppress(OSError, OverflowError):
        if (pid := told_address(file).pid) > 0:
            os.kill(pid, 0)
            return pid
    return 0


def local_url(file: Path, bind: str) -> str:
    """Where others on this machine reach a role that wrote this file and listens on `bind`; "" if it wrote none."""
    port = told_address(file).port
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}" if port else ""


def reader_url(address: Path, bind: str) -> str:
    """The same for readers of a folder, which may be a stranger's; "" unless `bind` is an address of this machine."""
    return local_url(address, bind) if is_of_this_machine(bind) else ""  # guard: readers-ask-this-machine


def is_of_this_machine(bind: str) -> bool:
    """Whether one can listen there. Names are not looked up: that would ask whom the name's owner chose."""
    if bind in ("", "localhost"):
        return True
    with contextlib.suppress(ValueError, OSError):
        found = ipaddress.ip_address(bind)
        if found.is_loopback or found.is_unspecified:
            return True
        with socket.socket(socket.AF_INET6 if found.version == 6 else socket.AF_INET) as probe:
            probe.bind((bind, 0))
        return not found.is_multicast
    return False


def _remedy(error: OSError, key: str) -> str:
    """Why a port cannot be had, and what to do; `key` sets the port."""
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        where = key.replace("port", "bind")
        return (
            f"{cause_of(error)}. It is no address of this machine: set {where} to 0.0.0.0 (all of them), 127.0.0.1 (this "
            "machine alone), or one of its own. Where others reach it through a proxy is its public URL"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{cause_of(error)}. Ports below 1024 belong to root: set {key} to a larger one; 0 takes a free one"
    free = f"set {key} to another port; 0 takes a free one"
    return f"{cause_of(error)}. Another program may be serving there: stop it, or {free}"


def listen(bind: str, port: int, last: int = 0, key: str = "--port") -> socket.socket:
    """A listening socket at `port`; if that is 0, at the port of the last start, or else at a free one.

    `key` is what the user sets to choose the port. Raises `StateError`.
    """
    if port == 0 and last:
        with contextlib.suppress(StateError):
            return listen(bind, last)
    listener = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise StateError(f"cannot listen on {bind} port {port}: {_remedy(error, key)}") from None
    return listener


# --- Clean stops ---
#
# The first signal lets a role finish its work, the second ends the process at once.


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

"""One launcher in a run folder, and one node in a home: a lock on the folder, which also says how a worker is paused.

The roles of a launcher inherit its descriptor. So the folder is held until the last of them has ended, even if the launcher
was killed.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from shoal.config import HostConfig
from shoal.errors import ShoalError, StateError, cause_of
from shoal.net.server_address import listen, port_of_last_start
from shoal.run_folder import RunFolder, is_locked

LOCK_WAIT_S = 5.0
"""Processes of a launcher that was killed need a moment to notice and to release the folder."""


@contextlib.contextmanager
def locked(run_dir: Path, instead: str = "give this run another folder with --out") -> Iterator[int]:
    """Hold a run folder for one launcher and its roles, or a home for one node; yields the descriptor that roles inherit.

    Raises `StateError` when another process holds it. `instead` says what the user can do then.
    """
    fd, deadline = _open(run_dir, instead), time.monotonic() + LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
                    raise StateError(
                        f"{run_dir} is in use by another shoal (process {holder}): stop that one first, or {instead}"
                    ) from None
                time.sleep(0.1)
                continue
            if os.fstat(fd).st_nlink:
                break
            # The process that held the lock has removed the folder: this lock excludes nobody.
            stale, fd = fd, _open(run_dir, instead)
            os.close(stale)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield fd
    finally:
        os.close(fd)


def _open(run_dir: Path, instead: str) -> int:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError):
        raise StateError(f"{run_dir} is a file, or below one, and has to be a folder: {instead}") from None
    except OSError as error:
        raise StateError(f"cannot write to {run_dir}: {cause_of(error)}. Free some space, or {instead}") from None


def demand_free_ports(run_dir: Path, host: HostConfig, hosts: bool) -> list[str]:
    """Raise `StateError` if a process of a run could not listen at its port. Called before anything is made. Returns what
    to say of ports of the last start that others have taken. `hosts`: the page has a process, too."""
    if is_locked(run_dir):
        return []
    folder, said = RunFolder(run_dir), list[str]()
    asked = [("coordinator", "port", folder.address), ("origin", "origin_port", folder.origin_address)]
    asked += [("page", "dashboard_port", folder.dashboard_address)] * (hosts and host.dashboard)
    for what, key, address in asked:
        port, last = getattr(host, key), port_of_last_start(address)
        with listen(host.bind, port, last, f"host.{key}") as listener:
            found = listener.getsockname()[1]
        if last and not port and found != last:
            said.append(
                f"Port {last}, at which the {what} of this run was before, is taken, so it gets a free one: stop what "
                f"listens there and start again, or set host.{key}"
            )
    return said


@contextlib.contextmanager
def locked_run(run_dir: Path) -> Iterator[int]:
    """As `locked`, for a run. If its start is refused before anything began, a folder that this start made is removed."""
    folder, is_new = RunFolder(run_dir), not os.path.lexists(run_dir)
    with locked(run_dir) as fd:
        try:
            yield fd
        except ShoalError as refused:
            began = folder.log.exists() or folder.policy.exists() or str(folder.logs) in str(refused)
            if is_new and not began:  # guard: only-own-folders-are-removed
                shutil.rmtree(run_dir, ignore_errors=True)
            raise


# --- pausing a worker: the lock of its folder names its process, and that it has the handlers of these signals ---

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

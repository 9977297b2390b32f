"""One launcher in a run folder, and one node in a home: a lock on the folder.

Called by whatever starts roles: `shoal run`, `host`, `stages`, `join`, and programs. It knows nothing of what the folder
holds. The roles of a launcher inherit its descriptor. So the folder is held until the last of them has ended, even if the
launcher was killed.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import StateError, cause_of

LOCK_WAIT_S = 5.0
"""Processes of a launcher that was killed need a moment to notice and to release the folder."""


@contextlib.contextmanager
def locked(run_dir: Path, instead: str = "give this run another folder with --out") -> Iterator[int]:
    """Hold a run folder for one launcher and its roles, or a home for one node; yields the descriptor that roles inherit.

    Raises `StateError` when another process holds it. `instead` says what the user can do then.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StateError(f"cannot write to {run_dir}: {cause_of(error)}. Free some space, or {instead}") from None
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
                    raise StateError(
                        f"{run_dir} is in use by another shoal (process {holder}): stop that one first, or {instead}"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield fd
    finally:
        os.close(fd)

"""Keeps the log of each process small: when it is large, its text moves into an older file, of which there are few.

Called by `launch/process` while a process lives. What the process, its libraries and its children print goes to this file,
which the launcher opened to append, so they need not know that it was emptied. A full disk stops nothing.
"""

import contextlib
import os
import shutil
from pathlib import Path

LOG_BYTES = 10_000_000
"""A log that has grown beyond this is moved."""

OLD_LOGS = 2
"""Older files kept of each, `NAME.log.1` the newest: a process has at most three times LOG_BYTES."""

RETRY_S = 60.0
"""After a failure, such as a disk without room for the copy."""


class LogFile:
    """The log of one process."""

    def __init__(self, path: Path, most_bytes: int = LOG_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Move the text if there is much of it. Raises nothing."""
        if now < self._look_at:
            return
        try:
            if self.path.exists() and self.path.stat().st_size > self._most_bytes:  # guard: logs-stay-small
                self._move()
        except OSError:
            self._look_at = now + RETRY_S

    def _move(self) -> None:
        """The process has the file open, so the text is copied, and the file emptied. What is written in the microseconds
        between the last read and the cut is lost."""
        copy = self.path.with_name(f".{self.path.name}.new")
        try:
            with self.path.open("rb") as log, copy.open("wb") as old:
                shutil.copyfileobj(log, old, 1 << 20)
                old.flush()  # here a full disk is noticed, before anything is cut
                old.write(log.read())
                os.truncate(self.path, 0)
            for number in range(OLD_LOGS, 1, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._old(number - 1), self._old(number))
            os.replace(copy, self._old(1))
        finally:
            copy.unlink(missing_ok=True)

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

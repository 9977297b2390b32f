"""Log files of roles: their format, and their rotation by size."""

import contextlib
import logging
import os
import shutil
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from shoal.errors import ConfigError, cause_of
from shoal.terminal import JsonFormatter, PrintableFormatter

LOG_BYTES = 10_000_000
"""A log that has grown beyond this is moved."""


OLD_LOGS = 2
"""Older files kept of each, `NAME.log.1` the newest: a process has at most three times LOG_BYTES."""


RETRY_S = 60.0
"""After a failure, such as a disk without room for the copy."""


JSON_SUFFIX = ".jsonl"
"""A file that a person names for a log has JSON lines if its name ends so."""


def formatter(role: str = "", form: Literal["text", "json"] = "text") -> logging.Formatter:
    """How the log of a role is written: into a file, which is kept, with the date; without a role, for a person who looks
    on."""
    if form == "json":
        return JsonFormatter(role)
    if role:
        dated = "%(asctime)s %(levelname)-7s %(name)-11s %(message)s"
        return PrintableFormatter(dated, datefmt="%Y-%m-%d %H:%M:%S")
    return PrintableFormatter("%(asctime)s %(name)-11s %(message)s", datefmt="%H:%M:%S")


def log_into(path: Path, role: str, form: Literal["text", "json"], most_bytes: int = LOG_BYTES) -> logging.Handler:
    """A handler that appends to a file and moves its text as `LogFile` does. Raises nothing."""
    # guard: own-log-stays-small
    handler = _Quiet(path, maxBytes=most_bytes, backupCount=OLD_LOGS, delay=True, encoding="utf-8")
    handler.setFormatter(formatter(role, form))
    return handler


def named_log(path: Path, role: str) -> logging.Handler:
    """The same for a file that a person names. Raises `ConfigError` if it cannot be written now."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"--log: cannot write to {path}: {cause_of(error)}. Name a file in a folder that exists"
        ) from None
    return log_into(path, role, "json" if path.suffix == JSON_SUFFIX else "text")


class _Quiet(RotatingFileHandler):
    """Where the disk is full, lines are lost, and nothing is printed in their place."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""


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

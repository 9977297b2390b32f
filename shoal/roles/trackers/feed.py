"""Gives the rows of a run to one logger for as long as the run lasts, whatever the logger does.

`role` runs one in a thread for each logger, so a logger that hangs holds up no other. A logger that fails is opened again
later, and gets what it has missed: the run's folder is the queue. It does not know which logger it feeds.

A small file says what the logger was given, and is written afterwards. So a kill loses no row, and may give some twice,
which the logger knows by their step.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.errors import cause_of
from shoal.roles.trackers.rows import Given, Row, Rows
from shoal.run_folder import RunFolder, write_atomically

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between looks at the run's folder."""

FIRST_RETRY_S, MAX_RETRY_S = 2.0, 300.0
"""After a failure; each further one in a row doubles the time."""


class Logger(Protocol):
    """Where rows go. Each of its methods may raise anything."""

    is_durable: bool
    """Whether a row that was written survives a kill of this process."""

    def write(self, row: Row) -> None:
        """Take a row. If it has the row's step already, nothing changes."""

    def close(self) -> None:
        """Finish what is in queues."""


class Follower:
    """One logger and its place in the run."""

    def __init__(self, name: str, make: Callable[[], Logger], folder: RunFolder) -> None:
        """`make` opens the logger."""
        self.name = name
        self._make, self._folder = make, folder
        self._file = folder.loggers / f"{name}.json"
        self._logger: Logger | None = None
        self._rows: Rows | None = None
        self._failures = 0

    def run(self, stop: threading.Event) -> None:
        """Follow the run until told to stop, and then to its end."""
        while not stop.is_set():
            stop.wait(self.look())
        self.look(is_stopping=True)
        self.close()

    def look(self, is_stopping: bool = False) -> float:
        """Give the logger what is new; `is_stopping` as in `Rows.new`. Returns the seconds after which to look again."""
        try:
            if self._logger is None or self._rows is None:
                self._logger, self._rows = self._make(), Rows(self._folder, given_in(self._file))
            for row in self._rows.new(is_stopping):
                self._logger.write(row)
                if self._logger.is_durable:  # guard: rows-in-memory-come-again
                    self._save(self._rows.given)
        except Exception as error:  # noqa: BLE001  a logger may raise anything; it is opened again
            return self._failed(error)
        self._failures = 0
        return POLL_S

    def close(self) -> None:
        """Let the logger finish. A failure is logged; what it lost comes with the next start of the run."""
        logger, rows, self._logger = self._logger, self._rows, None
        if logger is not None and rows is not None:
            try:
                logger.close()
                self._save(rows.given)
            except Exception as error:  # noqa: BLE001  the same
                log.warning("logger=%s did not close cause=%s", self.name, _said(error))

    def _save(self, given: Given) -> None:
        write_atomically(self._file, msgspec.json.encode(given))

    def _failed(self, error: Exception) -> float:
        retry_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failures)
        self._failures += 1
        log.warning("logger=%s failed, the run continues retry_s=%.0f cause=%s", self.name, retry_s, _said(error))
        logger, self._logger, self._rows = self._logger, None, None
        if logger is not None:
            with contextlib.suppress(Exception):
                logger.close()
        return retry_s


def given_in(file: Path) -> Given:
    """What a logger was given, by its file; nothing if there is none, or none that can be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Given)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return Given()


def _said(error: Exception) -> str:
    text = cause_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())

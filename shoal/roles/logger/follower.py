"""Gives the rows of a run to one logger, each once, for as long as the run lasts, whatever the logger does.

`role` runs one in a thread for each logger, so a logger that hangs holds up no other. A logger that fails is opened again
later, and gets what it has missed: the run's folder is the queue. It does not know which logger it feeds.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from shoal.errors import cause_of
from shoal.roles.logger.rows import Journal, Row, Rows

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between looks at the run's folder."""

FIRST_RETRY_S, MAX_RETRY_S = 2.0, 300.0
"""After a failure; each further one in a row doubles the time."""


class Logger(Protocol):
    """Where rows go. Each of its methods may raise anything."""

    def held(self) -> int:
        """How many rows of this run it has for good: those that survive a kill of this process."""

    def write(self, row: Row) -> None:
        """Take a row. Another follows when this one is written or in a queue, in this order."""

    def close(self) -> None:
        """Finish what is in queues."""


class Follower:
    """One logger and its place in the run."""

    def __init__(
        self, name: str, make: Callable[[], Logger], make_rows: Callable[[], Rows], journal: Journal
    ) -> None:  # fmt: skip
        """`make` opens the logger, and `make_rows` begins the run's rows at the first."""
        self.name = name
        self._make, self._make_rows, self._journal = make, make_rows, journal
        self._logger: Logger | None = None
        self._rows: Rows | None = None
        self._failures = 0

    def run(self, stop: threading.Event) -> None:
        """Follow the run until told to stop, and then to its end."""
        while not stop.is_set():
            stop.wait(self.look())
        self.look()
        self.close()

    def look(self) -> float:
        """Give the logger what is new. Returns the seconds after which to look again."""
        try:
            if self._logger is None or self._rows is None:
                self._logger = self._make()
                self._journal.open(self._logger.held())
                self._rows = self._make_rows()
            for row in self._rows.new():
                if row.name not in self._journal:  # guard: row-is-logged-once
                    self._journal.add(row.name)
                    self._logger.write(row)
        except Exception as error:  # noqa: BLE001  a logger may raise anything; it is opened again
            return self._failed(error)
        self._failures = 0
        return POLL_S

    def close(self) -> None:
        """Let the logger finish. A failure is logged; what it lost comes with the next start of the run."""
        logger, self._logger = self._logger, None
        if logger is not None:
            try:
                logger.close()
            except Exception as error:  # noqa: BLE001  the same
                log.warning("logger=%s did not close cause=%s", self.name, _said(error))

    def _failed(self, error: Exception) -> float:
        retry_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._failures)
        self._failures += 1
        log.warning("logger=%s failed, the run continues retry_s=%.0f cause=%s", self.name, retry_s, _said(error))
        logger, self._logger, self._rows = self._logger, None, None
        if logger is not None:
            with contextlib.suppress(Exception):
                logger.close()
        return retry_s


def _said(error: Exception) -> str:
    text = cause_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())

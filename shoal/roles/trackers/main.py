"""The logger: copies the figures of a run into W&B, trackio and TensorBoard, as `logging.to` of the run file says.

It reads what the trainer and the evaluations leave in the run's folder, so nothing waits for it. Each logger has a thread,
so one that hangs holds up no other. One that fails is opened again later, and gets what it has missed. A small file says
what a logger was given, and is written afterwards: a kill loses no row, and may give some twice, which it knows by step.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Protocol

import msgspec

from shoal.config import RunConfig, settle_loggers
from shoal.errors import cause_of
from shoal.protocol.hub_reference import is_hub
from shoal.roles.trackers.loggers import TensorBoard, Trackio, WandB
from shoal.roles.trackers.tracker_rows import Given, Row, Rows
from shoal.run_folder import RunFolder, write_atomically

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between looks at the run's folder."""

FIRST_RETRY_S, MAX_RETRY_S = 2.0, 300.0
"""After a failure; each further one in a row doubles the time."""

FINISH_S = 25.0
"""After the run's end the loggers may take this long for what is left. The launcher waits a little longer."""


def main(run_dir: Path) -> None:
    """Follow a run until told to stop by SIGTERM."""
    folder = RunFolder(run_dir)
    config = folder.config()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settle_loggers(folder.loggers)
    if follow(followers(folder, config), stop):
        return
    os._exit(0)  # a thread of a logger that hangs would keep the process


def followers(folder: RunFolder, config: RunConfig) -> "list[Follower]":
    """One for each logger that the run file names, but `jsonl`, which is what the trainer writes."""
    project, run, about = config.logging.project, config.name, _about(config)
    makers: dict[str, Callable[[], Logger]] = {
        "wandb": lambda: WandB(folder.loggers, project, run, folder.run_id(), about),
        "trackio": lambda: Trackio(project, run, folder.run_id(), about),
        "tensorboard": lambda: TensorBoard(folder.loggers / "tensorboard"),
    }
    return [Follower(name, makers[name], folder) for name in dict.fromkeys(config.logging.to) if name in makers]


def follow(all_: "Iterable[Follower]", stop: threading.Event, finish_s: float = FINISH_S) -> bool:
    """Run each in a thread until `stop`; returns whether all came to their end in time."""
    threads = [threading.Thread(target=one.run, args=(stop,), name=one.name, daemon=True) for one in all_]
    for thread in threads:
        thread.start()
    log.info("loggers=%s", ",".join(thread.name for thread in threads))
    while not stop.wait(1.0):  # without a timeout, the signal's handler would not be called
        pass
    deadline = time.monotonic() + finish_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.warning("logger=%s did not finish in time after_s=%.0f", thread.name, finish_s)
    return not any(thread.is_alive() for thread in threads)


def _about(config: RunConfig) -> dict[str, object]:
    """What loggers show of the run file: enough to tell runs apart. Not its seed: secrets may follow from it.
    Of a model's folder only the name: the others tell about the host's machine."""
    train, rollouts = config.train, config.rollouts
    return {
        "name": config.name,
        "steps": config.steps,
        "envs": ", ".join(env.label for env in config.envs),
        "policy": config.policy.path if is_hub(config.policy.path) else PurePath(config.policy.path).name,
        "lr": train.lr,
        "group_size": rollouts.group_size,
        "batch_groups": rollouts.batch_groups,
        "max_staleness": rollouts.max_staleness,
    }


# --- One logger, and its place in the run ---


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

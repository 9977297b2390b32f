"""A whole run in a thread of the caller's process, for programs, which have no terminal and no Ctrl-C.

Only the launcher runs in the thread. The roles are processes, as under `shoal run`, and end when this process ends. It
gives each training step's metrics to the caller, and looks only at the number of the step.
"""

import atexit
import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import RenderableType

from shoal.config import RunConfig
from shoal.envs.load import is_repeatable
from shoal.errors import ShoalError, StateError, fault_of_user, no_torch
from shoal.launch.admin import shared_url
from shoal.launch.local_run import open_local_run
from shoal.launch.run_lock import demand_free_ports, locked_run
from shoal.run_folder import RunFolder
from shoal.runs.run_status import RunStatus
from shoal.step_metrics import read_metrics, step_of
from shoal.terminal import printable
from shoal.views.terminal.live_view import WATCHDOG_S

log = logging.getLogger("shoal")


class BackgroundRun:
    """A run that has been started, until it has ended or `stop` ends it."""

    def __init__(
        self, config: RunConfig, recipe_dir: Path, out: Path, with_workers: bool, overrides: tuple[str, ...] = ()
    ) -> None:
        """Lock and prepare the folder, then start. `overrides` are as of `RunFolder.prepare`. Raises `ShoalError` as
        `shoal run` does."""
        if find_spec("torch") is None:
            raise ShoalError(no_torch())
        for line in demand_free_ports(out, config.host, hosts=not with_workers):
            log.warning("%s", line)
        RunFolder(out).demand_own()
        self.out = out
        self._host = config.host
        self._news = _News()
        self._fault: Exception | None = None
        self._url = ""
        self._answers = threading.Event()
        with contextlib.ExitStack() as stack:
            lock_fd = stack.enter_context(locked_run(out))
            folder = RunFolder(out)
            folder.prepare(
                config, recipe_dir, for_others=not with_workers, repeatable=is_repeatable, overrides=overrides
            )
            done = read_metrics(folder.metrics)
            self._news.next_step = step_of(done[-1]) + 1 if done else 0
            self._local_run = open_local_run(out, lock_fd, with_workers, lambda: self._news)
            self._held = stack.pop_all()
        self._thread = threading.Thread(target=self._run, name=f"shoal {config.name}", daemon=True)
        # A program may end without stopping its run. Python would then cut off this thread, and the roles would be killed.
        atexit.register(self.stop)
        self._thread.start()

    def url(self) -> str:
        """The URL that others type, once the coordinator answers. Raises the error that ended the run before that."""
        self._answers.wait()
        if not self._url:
            self.stop()
            raise StateError(f"the run in {self.out} was stopped before its coordinator answered: start it again")
        return self._url

    def steps(self) -> Iterator[dict[str, Any]]:
        """The metrics of each new step until the run has ended. Raises the error that ended it, if one did."""
        while (metrics := self._news.queue.get()) is not None:
            yield metrics
        self._news.queue.put(None)  # for a caller that asks again
        self._thread.join()
        self._raise_fault()

    def stop(self) -> None:
        """End the run as Ctrl-C does, and wait until its processes are gone. Ctrl-C meanwhile ends them at once.

        Raises the error that ended the run, unless it was raised before.
        """
        interrupt: KeyboardInterrupt | None = None
        supervisor = self._local_run.supervisor
        if not supervisor.stop_requests:
            supervisor.request_stop()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as another:
                interrupt = another
                supervisor.request_stop()
        atexit.unregister(self.stop)
        if interrupt is not None:
            raise interrupt
        self._raise_fault()

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _run(self) -> None:
        try:
            with self._held:
                self._local_run.run(self._announce)
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            self._fault = fault_of_user(error) or error
        finally:
            self._answers.set()
            self._news.queue.put(None)

    def _announce(self, url: str) -> str:
        self._url = shared_url(url, self._host)
        self._answers.set()
        return ""


class _News:
    """The launcher's view, in the place of a terminal: steps go into a queue, messages to the logger named `shoal`."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.next_step = 0
        self._waits, self._waiting_s = "", 0.0
        """The last wait that was logged, without its numbers, and how long the run has waited."""

    def show(self, snapshot: RunStatus) -> None:
        for metrics in snapshot.metrics:
            if metrics["step"] >= self.next_step:
                self.next_step = metrics["step"] + 1
                self.queue.put(metrics)
        status = snapshot.status
        waits, is_new = re.sub(r"\d+", "", status.waiting_for), status.waiting_s < self._waiting_s
        self._waits, self._waiting_s = "" if is_new else self._waits, status.waiting_s
        if status.waiting_s >= WATCHDOG_S and waits != self._waits:
            self._waits = waits
            log.info("waiting %.0f s for %s", status.waiting_s, printable(status.wait_in_words))

    def say(self, line: str, passes: bool = False) -> None:
        if line:
            log.warning("%s", printable(line, keep="\n"))

    def end(self, picture: RenderableType, text: str) -> None:
        log.info("%s", printable(text, keep="\n"))

    def close(self) -> None:
        pass

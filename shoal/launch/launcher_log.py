"""What the launcher says while a run goes on, kept in a log of its own: `logs/launcher.log` of the run's folder.

The log has what a screen forgets: alarms, what they led to, why a run paused, and which processes died. It has no line for
a step, because metrics.jsonl has one.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from shoal.launch.log_rotation import log_into
from shoal.launch.role_process import RoleProcess
from shoal.runs.run_status import RunStatus, suspended_process
from shoal.views.terminal.live_view import RunView


class LoggingView:
    """A view that passes all on to another, and keeps what is said."""

    def __init__(self, view: RunView, path: Path, form: Literal["text", "json"]) -> None:
        self._view = view
        # Not one of `logging.getLogger`: a program may have several runs, and each has its own file.
        self._log, self._file = logging.Logger("shoal.launch", logging.INFO), log_into(path, "launcher", form)
        self._log.addHandler(self._file)
        self._restarts: dict[str, int] = {}
        self._phase = ""
        self._lost, self._stopped = set[str](), set[str]()

    def show(self, snapshot: RunStatus) -> None:
        """See `View`. Keeps the changes of the run's phase."""
        self._view.show(snapshot)
        if snapshot.status.phase != self._phase:
            self._phase = snapshot.status.phase
            self._keep(logging.INFO, "phase=%s step=%d", self._phase, snapshot.step)

    def say(self, line: str, passes: bool = False) -> None:
        """See `View`."""
        self._view.say(line, passes)
        if line.strip():
            self._keep(logging.INFO, "%s", line.strip("\n"))

    def died(self, processes: Iterable[RoleProcess], onlookers: Sequence[RoleProcess] = ()) -> None:
        """Say once of each process that died and is started again how it died. An onlooker's death is only kept."""
        for process in processes:
            if process.restarts != self._restarts.get(process.name, 0):
                self._restarts[process.name] = process.restarts
                if process not in onlookers:
                    self._view.say(
                        f"{process.name} died of {process.death} and is started again ({process.restarts}x so far). "
                        f"Its log: {process.log}"
                    )
                self._keep(
                    logging.WARNING, "process=%s died of %s, started again restarts=%d", process.name, process.death,
                    process.restarts,
                )  # fmt: skip

    def stopped(self, processes: Iterable[RoleProcess]) -> None:
        """Say once of each process that was stopped by a signal, and of none that ended."""
        found = {process.name: said for process in processes if (said := suspended_process(process.pid))}
        for name in found.keys() - self._stopped:
            self.say(f"{name}: {found[name]}")
        self._stopped = {*found}

    def lost(self, onlookers: Iterable[RoleProcess], at_end: bool = False) -> None:
        """Say once of each process without which the run goes on, such as the logger, that it is gone. `at_end`: also of
        one that has died and was not started again."""
        for process in onlookers:
            gone = process.state == "given up" or (at_end and process.state == "restarting" and process.restarts > 0)
            if gone and process.name not in self._lost:
                self._lost.add(process.name)
                why = process.reason or f"{process.name} died {process.restarts} times"
                self.say(f"the run goes on without {process.name}: {why} (full log: {process.log})")

    def end(self, picture: RenderableType, text: str) -> None:
        """See `View`."""
        self._view.end(picture, text)
        self._keep(logging.INFO, "%s", text)

    def close(self) -> None:
        """See `View`. What is said afterwards is kept, too."""
        self._view.close()

    def _keep(self, level: int, text: str, *values: object) -> None:
        self._log.log(level, text, *values)
        self._file.close()  # it opens again: lines are rare, and a program that has many runs must not keep a file for each

"""What the launcher says while a run goes on, kept in a log of its own: `logs/launcher.log` of the run's folder.

Called by `launch/local`, which says it to a view as before. The log has what a screen forgets: alarms, what they led to,
why a run paused, and which processes died. It has no line for a step, because metrics.jsonl has one.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from shoal.launch.logfiles import log_into
from shoal.launch.process import RoleProcess
from shoal.launch.snapshot import Snapshot
from shoal.launch.view import View


class Told:
    """A view that passes all on to another, and keeps what is said."""

    def __init__(self, view: View, path: Path, form: Literal["text", "json"]) -> None:
        self._view = view
        # Not one of `logging.getLogger`: a program may have several runs, and each has its own file.
        self._log, self._file = logging.Logger("shoal.launch", logging.INFO), log_into(path, "launcher", form)
        self._log.addHandler(self._file)
        self._restarts: dict[str, int] = {}
        self._phase = ""
        self._lost = set[str]()

    def show(self, snapshot: Snapshot) -> None:
        """See `View`. Keeps the changes of the run's phase, and which process was started again."""
        self._view.show(snapshot)
        if snapshot.status.phase != self._phase:
            self._phase = snapshot.status.phase
            self._keep(logging.INFO, "phase=%s step=%d", self._phase, snapshot.step)
        for name, times in snapshot.restarts.items():
            if times != self._restarts.get(name, 0):
                self._restarts[name] = times
                self._keep(logging.WARNING, "process=%s died, started again restarts=%d", name, times)

    def say(self, line: str) -> None:
        """See `View`."""
        self._view.say(line)
        if line.strip():
            self._keep(logging.INFO, "%s", line.strip("\n"))

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

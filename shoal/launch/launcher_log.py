"""What the launcher says while a run goes on, kept in a log of its own: `logs/launcher.log` of the run's folder.

The log has what a screen forgets: alarms, what they led to, why a run paused, and which processes died. It has no line for
a step, because metrics.jsonl has one.
"""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from shoal.config import RunConfig
from shoal.errors import ShoalError
from shoal.evaluation_files import BEFORE
from shoal.launch.log_rotation import log_into
from shoal.launch.role_process import RoleProcess
from shoal.ledger.fault_rate import FAULTS
from shoal.ledger.remedies import IN_A_NEW_RUN, no_signal_remedy
from shoal.ledger.run_events import NO_SIGNAL
from shoal.monitors import config_warnings
from shoal.run_folder import RunFolder
from shoal.runs.rollout_samples import flat_samples, newest_refusal, why_flat, why_paused
from shoal.runs.run_status import RunStatus, suspended_process
from shoal.terminal import as_called
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
        """See `RunView`. Keeps the changes of the run's phase."""
        self._view.show(snapshot)
        if snapshot.status.phase != self._phase:
            self._phase = snapshot.status.phase
            self._keep(logging.INFO, "phase=%s step=%d", self._phase, snapshot.step)

    def say(self, line: str, passes: bool = False) -> None:
        """See `RunView`."""
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
        one that died lately."""
        for process in onlookers:
            gone = process.state == "given up" or (at_end and process.keeps_dying())
            if gone and process.name not in self._lost:
                self._lost.add(process.name)
                why = process.reason or f"{process.name} died {process.restarts} times"
                self.say(f"the run goes on without {process.name}: {why} (full log: {process.log})")

    def end(self, picture: RenderableType, text: str) -> None:
        """See `RunView`."""
        self._view.end(picture, text)
        self._keep(logging.INFO, "%s", text)

    def close(self) -> None:
        """See `RunView`. What is said afterwards is kept, too."""
        self._view.close()

    def _keep(self, level: int, text: str, *values: object) -> None:
        self._log.log(level, text, *values)
        self._file.close()  # it opens again: lines are rare, and a program that has many runs must not keep a file for each


class RunMessages:
    """What a host is told of its run's state, each thing once."""

    def __init__(self, folder: RunFolder, config: RunConfig, view: LoggingView) -> None:
        self._folder, self._config, self._view = folder, config, view
        self._first, self._limits_said, self._paused = config_warnings.StartWarnings(), False, False

    def say(self, line: str) -> None:
        """Say a line whose commands name the run's folder."""
        self._view.say(as_called(line, self._folder.root))

    def explain_pause(self, snapshot: RunStatus, stage: Sequence[RoleProcess]) -> None:
        """Of a run that has paused itself: why, and where nothing was learned, two rollouts of what it was paid for."""
        status = snapshot.status
        cause = status.pause_cause if status.phase == "paused" else ""  # it stays in the status of a run that ends
        before, self._paused = self._paused, cause == NO_SIGNAL or cause.startswith(FAULTS)
        if before and not self._paused:
            self._view.say(f"The pause is over: the run is {status.phase}")
        if not self._paused or before:
            return
        self.say(f"The run has paused itself and waits for {status.wait_in_words}")
        if cause != NO_SIGNAL:
            if stage:
                self._view.say(f"{stage[0].log} has the traceback or the call of each of these errors")
            return
        try:
            for sample in flat_samples(self._folder):
                self._view.say(sample, passes=True)
        except (ShoalError, OSError) as error:
            self._view.say(f"No rollout can be shown: {error}")
        if why := why_paused(self._folder, snapshot.metrics, status.flat_reward):
            self.say(f"{why}.")
        remedy = no_signal_remedy(status.flat_groups, status.unbegun_groups, status.unbegun_cause)
        again = "" if IN_A_NEW_RUN in remedy else "Resume restarts the count up to rollouts.max_flat_groups. "
        self._view.say(f"Accepted work stays paid. {again}Drain ends the run")

    def advise(self, snapshot: RunStatus, unbegun: tuple[int, str]) -> None:
        """What is unusual about the policy that the run began with, that all work is refused, or that token limits end many
        rollouts."""
        status = snapshot.status
        if not self._config.workers.cheating:  # whose work may be judged first
            with contextlib.suppress(ShoalError):  # the log is read again at the next look
                newest = partial(newest_refusal, self._folder.log)
                for line in self._first.look_at_refusals(status.accepted, status.refused, newest):
                    self._view.say(line)
        for line in self._first.look_at_unbegun(*unbegun):
            self._view.say(line)
        before = next((figures for name, figures in snapshot.heldout if name == BEFORE), None)
        flat = status.flat_groups - status.unbegun_groups
        why = partial(why_flat, self._folder)
        for line in self._first.look(before, snapshot.metrics, flat, status.flat_reward, why):
            self.say(line)
        if not self._limits_said and (line := config_warnings.token_limit_warning(snapshot.metrics, self._config)):
            self._limits_said = True
            self._view.say(line)

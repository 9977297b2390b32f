"""The held-out evaluations of a run: before training, of kept checkpoints during training, and after it.

Each is a process that leaves a file in the run's folder. A version with a file is not evaluated again, even if processes
were killed in between.
"""

import time
from collections.abc import Callable
from pathlib import Path

from shoal.config import RunConfig
from shoal.evaluation_files import AFTER, BEFORE, Evaluation, read_evaluation, results_in, version_of
from shoal.launch.role_process import RoleProcess
from shoal.run_folder import RunFolder

ON_THE_WAY = 4
"""A checkpoint during training is evaluated with one in this many of the episodes."""


class Evaluations:
    """Which evaluations are due, under way and done."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, make: Callable[[str, Path, Path, int], RoleProcess]
    ) -> None:
        """`make(name, checkpoint, out, one_in)` gives the process of an evaluation with one in so many of the run file's
        episodes, not yet started."""
        self._config, self._folder, self._make = config, folder, make
        self._wanted = any(config.eval_episodes(env) for env in config.envs)
        self.processes: list[RoleProcess] = []
        self._first_began: float | None = None
        self.first_took_s = 0.0
        """Wall time of the first version's evaluation, if this launcher saw it; the last one takes about as long."""

    def start_due(self) -> None:
        """Begin the next evaluation that is due: the first version, then the newest kept checkpoint."""
        if not self._wanted or not self.idle():
            return
        if self._first_began is not None:
            self.first_took_s, self._first_began = time.monotonic() - self._first_began, None
        kept = sorted(
            path for path in self._folder.checkpoints.glob("v*") if path.is_dir() and version_of(path.name) is not None
        )
        if not kept:
            return
        newest = version_of(kept[-1].name) or 0
        if not self._known(BEFORE):
            self._first_began = time.monotonic()
            self._begin(BEFORE, self._folder.checkpoints / "v000000")
        elif 0 < newest < self._config.steps and not self._known(kept[-1].name):
            self._begin(kept[-1].name, kept[-1], ON_THE_WAY)

    def start_last(self) -> None:
        """Evaluate the final policy, if that has not been done."""
        if self._wanted and not self._known(AFTER):
            self._begin(AFTER, self._folder.checkpoints / "final")

    def idle(self) -> bool:
        """Whether none is under way."""
        return all(process.state in ("done", "given up") for process in self.processes)

    def first_is_done(self) -> bool:
        """Whether the first version's evaluation is done, has failed, or is turned off."""
        return not self._wanted or (self._known(BEFORE) and self.idle())

    def last_is_done(self) -> bool:
        """Whether the final policy's evaluation is done, has failed, or is turned off."""
        return not self._wanted or (self._known(AFTER) and self.idle())

    def given_up(self) -> RoleProcess | None:
        """An evaluation that failed, if any."""
        return next((process for process in self.processes if process.state == "given up"), None)

    def results(self) -> tuple[tuple[str, Evaluation], ...]:
        """What has been measured, oldest version first."""
        return results_in(self._folder.evaluations)

    def _known(self, name: str) -> bool:
        started = any(process.name == f"evaluate-{name}" for process in self.processes)
        return started or read_evaluation(self._folder.evaluations / f"{name}.json") is not None

    def _begin(self, name: str, checkpoint: Path, one_in: int = 1) -> None:
        out = self._folder.evaluations / f"{name}.json"
        self.processes.append(self._make(f"evaluate-{name}", checkpoint, out, one_in))

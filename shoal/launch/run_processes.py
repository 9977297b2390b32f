"""The processes of a run on its host's machine: their commands, which of them the run needs, and its held-out evaluations.

Each evaluation is a process that leaves a file in the run's folder. A version with a file is not evaluated again, even if
processes were killed in between.
"""

import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import msgspec

from shoal.config import RunConfig, ValidatorsConfig, WorkersConfig
from shoal.config.role_options import EvalOptions, NodeOptions, TrainerOptions
from shoal.engine.dishonest import CHEATS
from shoal.evaluation_files import AFTER, BEFORE, Evaluation, read_evaluation, results_in, version_of
from shoal.launch.preflight import onlookers
from shoal.launch.role_process import RoleProcess
from shoal.launch.sizing import Shifts
from shoal.protocol.constants import COMPLETIONS
from shoal.run_folder import RunFolder


class RunProcesses:
    """The processes of one run, of which none runs yet."""

    def __init__(self, folder: RunFolder, lock_fd: int, with_workers: bool, shifts: Shifts) -> None:
        self.folder, self._lock_fd, self.with_workers, self._shifts = folder, lock_fd, with_workers, shifts
        self.config = shifts.config
        self.prompts = self.role("prompts")
        self.coordinator, self.origin = self.role("coordinator"), self.role("origin")
        self.onlookers = [self.role(name) for name in onlookers(self.config, not with_workers)]
        self.trainer: RoleProcess | None = None
        self.stage: list[RoleProcess] = []
        """The stage, in a run whose host plays environments."""
        self.validators: list[RoleProcess] = []
        self.workers: list[RoleProcess] = []
        self.evaluations = Evaluations(self.config, folder, self._evaluation)

    def add_others(self, url: str) -> None:
        """Those that call the coordinator, once it answers."""
        config = self.config
        if any(env.kind == COMPLETIONS for env in config.envs):
            self.stage = [self.role("stage")]
        options = TrainerOptions(url=url, shifts=self._shifts.folder_of("train"))
        self.trainer = self.role("trainer", config.train.threads, options)
        for i in range(config.validators.count):
            key_file = str(self.folder.keys / f"validator-{i}.key")
            self.validators.append(self._node(f"validator-{i}", url, config.validators, key_file=key_file))
        if not self.with_workers:
            return
        for i in range(config.workers.count):
            self.workers.append(self._node(f"worker-{i}", url, config.workers, engine=config.workers.engine))
        for i, cheat in zip(range(config.workers.cheating), cycle(CHEATS), strict=False):
            self.workers.append(
                self._node(f"cheater-{i}", url, config.workers, cheat=cheat)
            )  # cheats run in our own engine

    def _node(
        self, name: str, url: str, section: WorkersConfig | ValidatorsConfig, key_file: str = "", engine: str = "",
        cheat: str = "",
    ) -> RoleProcess:  # fmt: skip
        shifts = self._shifts.folder_of("workers" if isinstance(section, WorkersConfig) else "validators")
        options = NodeOptions(
            url=url, home=str(self.folder.nodes / name), run_dir=str(self.folder.root), name=name, key_file=key_file,
            threads=section.threads, device=section.device, engine=engine, cheat=cheat, shifts=shifts,
        )  # fmt: skip
        return self.role(name, section.threads, options)

    def _evaluation(self, name: str, checkpoint: Path, out: Path, one_in: int) -> RoleProcess:
        threads, shifts = self.config.workers.threads, self._shifts.folder_of("workers")
        options = EvalOptions(checkpoint=str(checkpoint), out=str(out), one_in=one_in, threads=threads, shifts=shifts)
        return self.role(name, threads, options)

    def role(self, name: str, threads: int = 1, options: msgspec.Struct | None = None) -> RoleProcess:
        """The process of a role of this run."""
        role = name.split("-")[0].replace("cheater", "worker")
        command = [sys.executable, "-m", "shoal.cli.main", "role", role, "--run-dir", str(self.folder.root)]
        if options is not None:
            command += ["--options", msgspec.json.encode(options).decode()]
        return RoleProcess(name, command, self.folder.logs / f"{name}.log", threads, self._lock_fd)

    def started(self) -> list[RoleProcess]:
        """Those that may run now: the others read the run file that the coordinator has taken."""
        if self.trainer is None:
            return [self.coordinator]
        return [
            self.coordinator, self.origin, *self.stage, self.trainer, *self.validators, *self.workers,
            *self.evaluations.processes, *self.onlookers,
        ]  # fmt: skip

    def askers(self) -> list[RoleProcess]:
        """Those but the workers that ask the coordinator."""
        return [*self.evaluations.processes, *filter(None, [self.trainer]), *self.validators, *self.stage]

    def needed_and_given_up(self) -> RoleProcess | None:
        """A process that was given up, and without which the run does not go on."""
        for process in self.started():
            if process.state != "given up":
                continue
            same = self.workers if process in self.workers else self.validators
            spare = process in same and any(p.state != "given up" for p in same if not p.name.startswith("cheater"))
            if not (spare or process in (self.origin, *self.onlookers, *self.evaluations.processes)):
                return process
        return None


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

"""A whole run on this machine: start its roles as processes, keep them alive, show how it goes, stop them in order.

Roles are started by command. After a kill at any moment, the same command resumes the run.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import msgspec
from rich.console import Console, Group

from shoal.chat.isolated import open_own
from shoal.config import RunConfig, ValidatorsConfig, WorkersConfig
from shoal.config.role_options import EvalOptions, NodeOptions
from shoal.engine.dishonest import CHEATS
from shoal.errors import ShoalError, StateError
from shoal.evaluation_files import BEFORE
from shoal.launch.admin import NodesWatch
from shoal.launch.alarms import AlarmWatch
from shoal.launch.evaluations import Evaluations
from shoal.launch.launcher_log import LoggingView
from shoal.launch.memory_plan import demand_fit, full_disk
from shoal.launch.preflight import STOP_S as LOGGER_STOP_S
from shoal.launch.preflight import (
    demand_codable,
    demand_computable,
    demand_engine_of_workers,
    demand_examined,
    demand_loggers,
    onlookers,
)
from shoal.launch.prompt_preview import PromptPreview
from shoal.launch.role_process import RoleProcess, counted_signals, with_ended_call, with_suspended
from shoal.launch.sizing import Shifts, first_spec, learned_parameters_of, resolve_sizes, shifts_of
from shoal.launch.summary import UsageBook, write_summary
from shoal.ledger.fault_rate import FAULTS
from shoal.ledger.hints import IN_A_NEW_RUN, no_signal_remedy
from shoal.ledger.run import NO_SIGNAL
from shoal.metrics import MetricsFollower, step_of
from shoal.models.hub_download import Hub
from shoal.monitors import advice
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.hub_reference import is_hub
from shoal.run_folder import RunFolder
from shoal.runs.conversation import NewestSample, Samples, flat_samples, newest_refusal, why_flat, why_paused
from shoal.runs.log import creation_of
from shoal.runs.run_status import USAGE, CoordinatorWatch, RunStatus, own_keys, suspended_process
from shoal.terminal import as_called, command, say
from shoal.views.terminal.end_screen import plain_end, render_end, save_picture
from shoal.views.terminal.live_view import LiveView, RunView, render
from shoal.views.terminal.panels import WATCHDOG_S

TICK_S = 0.1
LOOK_EVERY_S = 1.0
SAVE_USAGE_EVERY_S = 10.0
START_TIMEOUT_S = 60.0
WORKER_STOP_S = 30.0
"""A worker that is asked to end may take this long to finish and submit its block."""
STOP_S = 10.0
"""The other roles may take this long to end."""


def launch(
    run_dir: Path, lock_fd: int, with_workers: bool = True, announce: Callable[[str], str] | None = None,
    recipe: str = "RECIPE",
) -> int:  # fmt: skip
    """Run to the end, or until Ctrl-C; returns the exit code.

    `announce` is given the coordinator's URL once it answers; what it returns is printed (the join line). `recipe`: the run
    file and its options as they are typed, for the command that the end suggests.
    Raises `StateError` with the reason when a role cannot go on.
    """
    crew = open_crew(run_dir, lock_fd, with_workers, lambda: LiveView(Console()))
    crew.recipe = recipe
    with counted_signals(crew):
        return crew.run(announce)


def open_crew(run_dir: Path, lock_fd: int, with_workers: bool, make_view: Callable[[], RunView]) -> "LocalRun":
    """The processes of the run in a folder, not yet started. Raises as `check_first_policy` and `demand_fit`."""
    folder = RunFolder(run_dir)
    with contextlib.ExitStack() as refused:
        refused.callback(folder.drop_start_config)
        crew = _crew_of(folder, lock_fd, with_workers, make_view)
        refused.pop_all()
    return crew


def _crew_of(folder: RunFolder, lock_fd: int, with_workers: bool, make_view: Callable[[], RunView]) -> "LocalRun":
    config = folder.start_config()
    demand_loggers(config)
    if is_hub(config.policy.path) and not folder.policy.exists():
        Hub().bring(config.policy.path, folder.policy, say)
    if with_workers:
        demand_engine_of_workers(config)
    check_first_policy(folder, config)  # guard: first-policy-can-talk
    spec, found = first_spec(folder, config), tuple[str, ...]()
    if spec is not None:
        demand_codable(spec, config)
        config, found = resolve_sizes(config, spec, with_workers)
        demand_fit(config, spec, folder.root, with_workers)
        if config.policy.path and not folder.log.exists():
            demand_examined(
                first_policy(folder, config), config, (config.workers if with_workers else config.train).device
            )
        folder.keep_found(config)
    if spec is not None:
        found = (*found, *advice.config_warnings(config, learned_parameters_of(spec, config)))
    return LocalRun(folder, lock_fd, with_workers, make_view(), shifts_of(config, folder, spec, with_workers), found)


def first_policy(folder: RunFolder, config: RunConfig) -> Path:
    """Where the model is that the run begins with."""
    return folder.policy if folder.policy.exists() else Path(config.policy.path)


def check_first_policy(folder: RunFolder, config: RunConfig) -> None:
    """Raise `StateError` if the run's first policy, its tokenizer or its chat template cannot be used.

    Called before the trainer copies and publishes the policy. Without this check a hosted run would wait for ever,
    because each worker that joins would fail on its own machine.
    """
    if config.policy.path:
        first = first_policy(folder, config)
        open_own(first)
        demand_computable(first, config)  # guard: first-policy-is-computable


class LocalRun:
    """The processes of one run, and the last snapshot of it."""

    def __init__(
        self, folder: RunFolder, lock_fd: int, with_workers: bool, view: RunView, shifts: Shifts,
        found: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`found` is said when the run starts."""
        self.stop_requests = 0
        """Ctrl-C so far: the first stops cleanly, the second at once."""
        self.recipe = "RECIPE"
        """What is typed after `shoal host` for the same run."""
        config = shifts.config
        self._config, self._folder, self._lock_fd, self._shifts = config, folder, lock_fd, shifts
        self._view = LoggingView(view, folder.logs / "launcher.log", config.logging.format)
        self._found = found
        self._watch = CoordinatorWatch(folder.address, config.host.bind)
        self._metrics = MetricsFollower(folder.metrics)
        self._alarms = AlarmWatch(folder, config)
        self._first, self._limits_said = advice.StartWarnings(), False
        self._nodes, self._is_stopping = NodesWatch(), False
        self._usage = UsageBook(folder.root / USAGE, folder.summary.exists())
        self._draws = isinstance(view, LiveView) and view.is_picture
        self._samples = Samples(NewestSample(folder, own_files=True)) if self._draws else None
        self._prompts = PromptPreview(folder, self._role("prompts", threads=1))
        self._notice = ""
        self._paused = False
        self._looked = self._saved = -1e9
        self._answered = time.monotonic()
        """When the coordinator last answered."""
        self._snapshot = RunStatus(config.name, str(folder.root), config.steps)
        self._coordinator = self._role("coordinator", threads=1)
        self._origin = self._role("origin", threads=1)
        self._onlookers = [self._role(name, threads=1) for name in onlookers(config, not with_workers)]
        self._trainer: RoleProcess | None = None
        self._stage: list[RoleProcess] = []
        """The stage, in a run whose host plays environments."""
        self._validators: list[RoleProcess] = []
        self._workers: list[RoleProcess] = []
        self._with_workers = with_workers
        self._evaluations = Evaluations(config, folder, self._evaluation)

    def run(self, announce: Callable[[str], str] | None) -> int:
        """The story: coordinator first, then the others, until the run has ended; then the last evaluation."""
        try:
            for line in [*self._found, *self._shifts.in_words()]:
                self._view.say(line)
            self._await_prompts()
            url = self._start_coordinator()
            if url:
                for line in advice.task_warnings(creation_of(self._folder.log)):
                    self._view.say(line)
                if announce is not None:
                    self._view.say(announce(self._watch.public_url()))
                where = self._watch.public_url(), self._folder.root
                for line in advice.role_warnings(self._config, self._with_workers, *where):
                    self._view.say(line)
                self._start_others(url)
            self._wait("", until=self._has_ended)
            self._wait("finishing the evaluations on held-out tasks", until=self._evaluations.first_is_done)
            if not self.stop_requests:
                self._settle()
                self._stop_roles()
                self._evaluations.start_last()
            self._wait("evaluating the final policy on held-out tasks", until=self._evaluations.idle)
            if not self.stop_requests:
                self._notice = "the run has ended"
        finally:
            self._view.lost(self._onlookers, at_end=True)
            self._stop_roles((self._onlookers, LOGGER_STOP_S))
            self._save_usage()
            self._folder.drop_start_config()
            self._view.close()
        return self._say_stopped() if self.stop_requests else self._say_end()

    # --- starting ---

    def _await_prompts(self) -> None:
        """Show the first prompts. Raises `StateError` if the policy's chat template refuses one, or all are too long."""
        self._notice = "reading the first prompts of the environments"
        while self._prompts.is_awaited() and not self.stop_requests:
            for line in self._prompts.look():
                self._view.say(line, passes=True)
            self._look()
            time.sleep(TICK_S)

    def _start_coordinator(self) -> str:
        """Its URL, or "" when Ctrl-C came first. Raises `StateError` if it does not answer in time."""
        coordinator, deadline = self._coordinator, time.monotonic() + START_TIMEOUT_S

        def answers() -> bool:
            if time.monotonic() > deadline:
                raise StateError(
                    f"the coordinator did not answer within {START_TIMEOUT_S:.0f} s: its log {coordinator.log} says why"
                )
            return coordinator.pid is not None and self._watch.healthy(coordinator.pid)

        self._wait(self._start_notice(), until=answers)
        return "" if self.stop_requests else self._watch.url()

    def _start_notice(self) -> str:
        done = self._metrics.lines()
        reads = f": it reads the log of the {step_of(done[-1]) + 1} steps so far" if done else ""
        return f"starting the coordinator{reads if self._folder.log.exists() else ''}"

    def _start_others(self, url: str) -> None:
        config = self._config
        if any(env.kind == COMPLETIONS for env in config.envs):
            self._stage = [self._role("stage", threads=1)]
        shifts = ("--shifts", self._shifts.folder_of("train"))
        self._trainer = self._role("trainer", config.train.threads, "--url", url, *(shifts if shifts[1] else ()))
        for i in range(config.validators.count):
            key_file = str(self._folder.keys / f"validator-{i}.key")
            self._validators.append(self._node(f"validator-{i}", url, "validators", key_file=key_file))
        if not self._with_workers:
            return
        for i in range(config.workers.count):
            self._workers.append(self._node(f"worker-{i}", url, "workers", engine=config.workers.engine))
        for i, cheat in zip(range(config.workers.cheating), cycle(CHEATS), strict=False):
            self._workers.append(self._node(f"cheater-{i}", url, "workers", cheat=cheat))  # of our own engine's words

    def _node(
        self, name: str, url: str, section: str, key_file: str = "", engine: str = "", cheat: str = ""
    ) -> RoleProcess:
        config: WorkersConfig | ValidatorsConfig = getattr(self._config, section)
        options = NodeOptions(
            url=url, home=str(self._folder.nodes / name), run_dir=str(self._folder.root), name=name, key_file=key_file,
            threads=config.threads, device=config.device, engine=engine, cheat=cheat,
            shifts=self._shifts.folder_of(section),
        )  # fmt: skip
        return self._role(name, config.threads, "--options", msgspec.json.encode(options).decode())

    def _evaluation(self, name: str, checkpoint: Path, out: Path, one_in: int) -> RoleProcess:
        threads, shifts = self._config.workers.threads, self._shifts.folder_of("workers")
        options = EvalOptions(checkpoint=str(checkpoint), out=str(out), one_in=one_in, threads=threads, shifts=shifts)
        return self._role(name, threads, "--options", msgspec.json.encode(options).decode())

    def _role(self, name: str, threads: int, *args: str) -> RoleProcess:
        role = name.split("-")[0].replace("cheater", "worker")
        command = [sys.executable, "-m", "shoal.cli.main", "role", role, "--run-dir", str(self._folder.root), *args]
        return RoleProcess(name, command, self._folder.logs / f"{name}.log", threads, self._lock_fd)

    # --- watching ---

    def _has_ended(self) -> bool:
        self._evaluations.start_due()
        return self._snapshot.status.phase == "ended" and self._trainer is not None and self._trainer.state == "done"

    def _wait(self, notice: str, until: Callable[[], bool]) -> None:
        """Keep all processes alive and the view fresh until something holds or Ctrl-C asks for the end."""
        self._notice = notice
        while not self.stop_requests and not until():
            for process in self._processes():
                process.tend()
            self._view.died(self._processes(), self._onlookers)
            self._fail_if_given_up()
            self._look()
            time.sleep(TICK_S)

    def _look(self, every_s: float = LOOK_EVERY_S) -> None:
        """Take a snapshot and show it, if the last one is old."""
        now = time.monotonic()
        if now - self._looked < every_s:
            return
        self._looked, status = now, self._watch.status()
        waiting_for = with_ended_call(status.waiting_for, self._processes())
        waiting_for = with_suspended(waiting_for, self._processes(), partial(own_keys, self._folder))
        self._snapshot = RunStatus(
            name=self._config.name,
            out=str(self._folder.root),
            steps=self._config.steps,
            status=msgspec.structs.replace(status, waiting_for=waiting_for),
            url=self._watch.url(),
            elapsed_s=self._usage.wall_s(),
            metrics=self._metrics.lines(),
            nodes=tuple(sorted(self._watch.nodes(), key=lambda node: node.name)),
            cheaters=self._alarms.announced(),
            heldout=self._evaluations.results(),
            restarts={p.name: p.restarts for p in self._processes() if p.restarts},
            notice=self._notice or full_disk(self._folder.root) or self._silence(),
            evaluation_s=self._evaluations.first_took_s,
            sample=self._samples.latest() if self._samples and self._trainer else None,
            alarms=self._alarms.standing,
            hint=f"{self._folder.root} · stopping" if self.stop_requests else "",
        )
        self._view.show(self._shown())
        alarms = self._alarms.look(self._snapshot)
        for line in alarms:
            self._view.say(as_called(line, self._folder.root))
        self._view.stopped(self._processes())
        if self._watch.answers and self._snapshot.status.phase != "ended" and not self.stop_requests:
            for line in self._nodes.look(self._snapshot.nodes, self._is_stopping):
                self._view.say(as_called(line, self._folder.root))
        self._explain_pause()
        self._advise()
        if now - self._saved > SAVE_USAGE_EVERY_S:
            self._saved = now
            self._save_usage()

    def _silence(self) -> str:
        """What the view says while the coordinator does not answer; empty if it does. The status is then that of before."""
        now = time.monotonic()
        self._answered = now if self._watch.answers else self._answered
        if self._trainer is None or now - self._answered < WATCHDOG_S:
            return ""
        pid = self._coordinator.pid
        why = f"it is started again if its process ended; {self._coordinator.log} says more"
        return f"the coordinator has not answered for {now - self._answered:.0f} s: {suspended_process(pid) or why}"

    def _shown(self) -> RunStatus:
        """The snapshot for the host, whose commands have the run's folder: strangers never read it. Steps of an earlier
        start get no lines before the coordinator has taken the run up. A run that is still evaluated has not ended."""
        lines = self._trainer is None and not self._draws
        shot = replace(self._snapshot, metrics=()) if lines else self._snapshot
        phase, waiting_for = shot.status.phase, as_called(shot.status.waiting_for, self._folder.root)
        phase = "evaluating" if phase == "ended" and not self._evaluations.last_is_done() else phase
        return replace(shot, status=msgspec.structs.replace(shot.status, phase=phase, waiting_for=waiting_for))

    def _explain_pause(self) -> None:
        """Once for each time that the run paused itself: why, and where nothing was learned, two rollouts of what it was
        paid for."""
        status = self._snapshot.status
        cause = status.pause_cause if status.phase == "paused" else ""  # it stays in the status of a run that ends
        before, self._paused = self._paused, cause == NO_SIGNAL or cause.startswith(FAULTS)
        if before and not self._paused:
            self._view.say(f"The pause is over: the run is {status.phase}")
        if not self._paused or before:
            return
        self._view.say(f"The run has paused itself and waits for {self._shown().status.waiting_for}")
        if cause != NO_SIGNAL:
            if self._stage:
                self._view.say(f"{self._stage[0].log} has the traceback or the call of each of these errors")
            return
        try:
            for sample in flat_samples(self._folder):
                self._view.say(sample, passes=True)
        except (ShoalError, OSError) as error:
            self._view.say(f"No rollout can be shown: {error}")
        if why := why_paused(self._folder, self._snapshot.metrics, status.flat_reward):
            self._view.say(as_called(f"{why}.", self._folder.root))
        remedy = no_signal_remedy(status.flat_groups, status.unbegun_groups, status.unbegun_cause)
        again = "" if IN_A_NEW_RUN in remedy else "Resume restarts the count up to rollouts.max_flat_groups. "
        self._view.say(f"Accepted work stays paid. {again}Drain ends the run")

    def _advise(self) -> None:
        """Say what is unusual about the policy that the run began with, that all work is refused, or that token limits end
        many rollouts."""
        shot = self._snapshot
        if not self._config.workers.cheating:  # whose work may be judged first
            with contextlib.suppress(ShoalError):  # the log is read again at the next look
                newest = partial(newest_refusal, self._folder.log)
                for line in self._first.look_at_refusals(shot.status.accepted, shot.status.refused, newest):
                    self._view.say(line)
        for line in self._first.look_at_unbegun(*self._alarms.unbegun):
            self._view.say(line)
        before = next((figures for name, figures in shot.heldout if name == BEFORE), None)
        flat = shot.status.flat_groups - shot.status.unbegun_groups
        why = partial(why_flat, self._folder)
        for line in self._first.look(before, shot.metrics, flat, shot.status.flat_reward, why):
            self._view.say(as_called(line, self._folder.root))
        if not self._limits_said and (line := advice.token_limit_warning(shot.metrics, self._config)):
            self._limits_said = True
            self._view.say(line)

    def _fail_if_given_up(self) -> None:
        """Raise `StateError` if a role that the run needs was given up."""
        self._view.lost([self._origin, *self._onlookers])
        for process in self._processes():
            if process.state != "given up":
                continue
            same = self._workers if process in self._workers else self._validators
            spare = process in same and any(p.state != "given up" for p in same if not p.name.startswith("cheater"))
            if spare or process in (self._origin, *self._onlookers) or process.name.startswith("evaluate"):
                continue
            for line in process.last_words(12):
                self._view.say(f"{process.name} | {as_called(line, self._folder.root)}")
            raise StateError(as_called(f"{process.reason} (full log: {process.log})", self._folder.root))

    def _processes(self) -> list[RoleProcess]:
        """Those that may run now: the others read the run file that the coordinator has taken."""
        if self._trainer is None:
            return [self._coordinator]
        return [
            self._coordinator,
            self._origin,
            *self._stage,
            self._trainer,
            *self._validators,
            *self._workers,
            *self._evaluations.processes,
            *self._onlookers,
        ]

    def _save_usage(self) -> None:
        self._usage.save({p.name: p.use_so_far() for p in self._processes()})

    # --- stopping ---

    def _settle(self) -> None:
        """End the workers and wait until their last submissions are judged, so that the figures of the end are final."""
        self._stop((self._workers, WORKER_STOP_S))
        deadline = time.monotonic() + WORKER_STOP_S
        self._looked = -1e9
        self._look()
        self._wait(
            "judging the last submissions",
            until=lambda: not self._snapshot.status.pending or time.monotonic() > deadline,
        )

    def _stop_roles(self, *last: tuple[list[RoleProcess], float]) -> None:
        """End workers first, then all else that asks the coordinator, then the coordinator and those that are `last`, such
        as the logger, for which the last evaluation is a row, too."""
        self._is_stopping = True
        self._prompts.end()
        trainer = [self._trainer] if self._trainer is not None else []
        self._stop((self._workers, WORKER_STOP_S))
        self._stop(([*self._evaluations.processes, *trainer, *self._validators, *self._stage], STOP_S))
        self._stop(([self._origin, self._coordinator], STOP_S), *last)

    def _stop(self, *groups: tuple[list[RoleProcess], float]) -> None:
        """End groups of processes at once, and wait for each at most so many seconds."""
        group = [process for processes, _ in groups for process in processes]
        for process in group:
            process.ask_to_end()
        names = ", ".join(p.name for p in group if p.pid is not None)
        if names and self.stop_requests:
            how = "at once" if self.stop_requests > 1 else "(Ctrl-C again stops them at once)"
            self._notice = f"stopping {names} {how}"
        began = time.monotonic()
        while any(p.pid is not None for p in group):
            for processes, patience_s in groups:
                if time.monotonic() - began > patience_s or self.stop_requests > 1:
                    for process in processes:
                        process.kill()
            for process in self._processes():
                process.tend()
            if self._coordinator not in group:
                self._look()
            time.sleep(TICK_S)

    # --- the end ---

    def _say_stopped(self) -> int:
        done, steps, folder = self._snapshot.step, self._config.steps, str(self._folder.root)
        resume = command("admin", "resume", folder)
        missing = "" if self._folder.summary.exists() else ". The same command makes the missing evaluation and summary"
        after = {
            "ended": f"The run has ended{missing}",
            "draining": "The same command drains the run to its end",
            "paused": f"The same command starts its host again. The run stays paused until\n`{resume}`",
        }.get(self._snapshot.status.phase, "The same command resumes the run")
        self._view.say(f"Stopped at step {done} of {steps}.\n{after}.\nEverything is in {folder}")
        return 130

    def _say_end(self) -> int:
        self._snapshot = replace(self._snapshot, notice="", heldout=self._evaluations.results())
        end = write_summary(self._folder, self._config, self._snapshot, self._usage)
        end = replace(end, recipe=self.recipe, hosted=not self._with_workers)
        with contextlib.suppress(OSError):  # a picture for a README is not worth an error
            save_picture(Group(render(self._snapshot), render_end(end)), self._folder.root / "terminal.svg")
        self._view.end(render_end(end), plain_end(end))
        failed = self._evaluations.given_up()
        if failed is not None:
            raise StateError(f"the run ended, but an evaluation failed: {failed.reason} (full log: {failed.log})")
        return 0

"""A whole run on this machine: start its roles as processes, keep them alive, show how it goes, stop them in order.

Roles are started by command. After a kill at any moment, the same command resumes the run.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console, Group

from shoal.errors import EXIT_DONE, EXIT_INTERRUPTED, StateError
from shoal.launch.admin import NodesWatch
from shoal.launch.alarm_actions import AlarmWatch
from shoal.launch.launcher_log import LoggingView, RunMessages
from shoal.launch.memory_plan import demand_fit, full_disk
from shoal.launch.preflight import STOP_S as LOGGER_STOP_S
from shoal.launch.preflight import (
    check_first_policy,
    demand_codable,
    demand_engine_of_workers,
    demand_examined,
    demand_loggers,
    first_policy,
)
from shoal.launch.prompt_preview_process import PromptPreview
from shoal.launch.role_process import with_ended_call, with_suspended
from shoal.launch.run_processes import RunProcesses
from shoal.launch.sizing import first_spec, learned_parameters_of, resolve_sizes, shifts_of
from shoal.launch.summary import UsageBook, write_summary
from shoal.launch.supervisor import ProcessGroup, Supervisor
from shoal.models.hub_download import Hub
from shoal.monitors import config_warnings
from shoal.protocol.hub_reference import is_hub
from shoal.run_folder import RunFolder
from shoal.runs.log_follower import creation_of
from shoal.runs.remote_status import CoordinatorWatch
from shoal.runs.rollout_samples import NewestSample, Samples
from shoal.runs.run_status import USAGE, RunStatus, own_keys, suspended_process
from shoal.step_metrics import MetricsFollower, step_of
from shoal.terminal import as_called, command, say
from shoal.views.terminal.end_screen import plain_end, render_end, save_picture
from shoal.views.terminal.live_view import LiveView, RunView, render
from shoal.views.terminal.panels import WATCHDOG_S

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
    run = open_local_run(run_dir, lock_fd, with_workers, lambda: LiveView(Console()))
    with run.supervisor.counted_signals():
        return run.run(announce, recipe)


def open_local_run(run_dir: Path, lock_fd: int, with_workers: bool, make_view: Callable[[], RunView]) -> "LocalRun":
    """The run in a folder, not yet started. Raises as `check_first_policy` and `demand_fit`."""
    folder = RunFolder(run_dir)
    with contextlib.ExitStack() as refused:
        refused.callback(folder.drop_start_config)
        run = _checked(folder, lock_fd, with_workers, make_view)
        refused.pop_all()
    return run


def _checked(folder: RunFolder, lock_fd: int, with_workers: bool, make_view: Callable[[], RunView]) -> "LocalRun":
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
            device = (config.workers if with_workers else config.train).device
            demand_examined(first_policy(folder, config), config, device)
        folder.keep_found(config)
        found = (*found, *config_warnings.config_warnings(config, learned_parameters_of(spec, config)))
    shifts = shifts_of(config, folder, spec, with_workers)
    return LocalRun(RunProcesses(folder, lock_fd, with_workers, shifts), make_view(), (*found, *shifts.in_words()))


class LocalRun:
    """One run, and the last snapshot of it."""

    def __init__(self, processes: RunProcesses, view: RunView, found: Sequence[str] = ()) -> None:
        """`found` is said when the run starts."""
        self._processes, self._found, self.supervisor = processes, found, Supervisor()
        self._folder, self._config = folder, config = processes.folder, processes.config
        self._view = LoggingView(view, folder.logs / "launcher.log", config.logging.format)
        self._messages = RunMessages(folder, config, self._view)
        self._watch = CoordinatorWatch(folder.address, config.host.bind)
        self._metrics = MetricsFollower(folder.metrics)
        self._alarms, self._nodes, self._is_stopping = AlarmWatch(folder, config), NodesWatch(), False
        self._usage = UsageBook(folder.root / USAGE, folder.summary.exists())
        self._draws = isinstance(view, LiveView) and view.is_picture
        self._samples = Samples(NewestSample(folder, own_files=True)) if self._draws else None
        self._prompts = PromptPreview(folder, processes.prompts)
        self._notice = ""
        self._looked = self._saved = -1e9
        self._answered = time.monotonic()
        """When the coordinator last answered."""
        self._snapshot = RunStatus(config.name, str(folder.root), config.steps)

    def run(self, announce: Callable[[str], str] | None, recipe: str = "RECIPE") -> int:
        """The story: coordinator first, then the others, until the run has ended; then the last evaluation."""
        processes, evaluations = self._processes, self._processes.evaluations
        try:
            for line in self._found:
                self._view.say(line)
            self._await_prompts()
            url = self._start_coordinator()
            if url:
                self._welcome(announce)
                processes.add_others(url)
            self._wait("", until=self._has_ended)
            self._wait("finishing the evaluations on held-out tasks", until=evaluations.first_is_done)
            if not self.supervisor.stop_requests:
                self._settle()
                self._stop_roles()
                evaluations.start_last()
            self._wait("evaluating the final policy on held-out tasks", until=evaluations.idle)
            if not self.supervisor.stop_requests:
                self._notice = "the run has ended"
        finally:
            self._view.lost(processes.onlookers, at_end=True)
            self._stop_roles((processes.onlookers, LOGGER_STOP_S))
            self._save_usage()
            self._folder.drop_start_config()
            self._view.close()
        return self._say_stopped() if self.supervisor.stop_requests else self._say_end(recipe)

    # --- starting ---

    def _await_prompts(self) -> None:
        """Show the first prompts. Raises `StateError` if the policy's chat template refuses one, or all are too long."""
        self._notice = "reading the first prompts of the environments"

        def look() -> None:
            for line in self._prompts.look():
                self._view.say(line, passes=True)
            self._look()

        self.supervisor.wait(list, until=lambda: not self._prompts.is_awaited(), look=look)

    def _start_coordinator(self) -> str:
        """Its URL, or "" when Ctrl-C came first. Raises `StateError` if it does not answer in time."""
        coordinator, deadline = self._processes.coordinator, time.monotonic() + START_TIMEOUT_S

        def answers() -> bool:
            if time.monotonic() > deadline:
                raise StateError(
                    f"the coordinator did not answer within {START_TIMEOUT_S:.0f} s: its log {coordinator.log} says why"
                )
            return coordinator.pid is not None and self._watch.healthy(coordinator.pid)

        self._wait(self._start_notice(), until=answers)
        return "" if self.supervisor.stop_requests else self._watch.url()

    def _start_notice(self) -> str:
        done = self._metrics.lines()
        reads = f": it reads the log of the {step_of(done[-1]) + 1} steps so far" if done else ""
        return f"starting the coordinator{reads if self._folder.log.exists() else ''}"

    def _welcome(self, announce: Callable[[str], str] | None) -> None:
        url, config = self._watch.public_url(), self._config
        lines = [*config_warnings.task_warnings(creation_of(self._folder.log)), *([announce(url)] if announce else [])]
        for line in [
            *lines,
            *config_warnings.role_warnings(config, self._processes.with_workers, url, self._folder.root),
        ]:
            self._view.say(line)

    # --- watching ---

    def _has_ended(self) -> bool:
        self._processes.evaluations.start_due()
        trainer = self._processes.trainer
        return self._snapshot.status.phase == "ended" and trainer is not None and trainer.state == "done"

    def _wait(self, notice: str, until: Callable[[], bool]) -> None:
        """Keep all processes alive and the view fresh until something holds or Ctrl-C asks for the end."""
        self._notice = notice

        def look() -> None:
            self._view.died(self._processes.started(), self._processes.onlookers)
            self._fail_if_given_up()
            self._look()

        self.supervisor.wait(self._processes.started, until, look)

    def _look(self, every_s: float = LOOK_EVERY_S) -> None:
        """Take a snapshot and show it, if the last one is old."""
        now = time.monotonic()
        if now - self._looked < every_s:
            return
        self._looked, self._snapshot = now, self._take_snapshot()
        self._view.show(self._shown())
        for line in self._alarms.look(self._snapshot):
            self._messages.say(line)
        self._view.stopped(self._processes.started())
        if self._watch.answers and self._snapshot.status.phase != "ended" and not self.supervisor.stop_requests:
            for line in self._nodes.look(self._snapshot.nodes, self._is_stopping):
                self._messages.say(line)
        self._messages.explain_pause(self._snapshot, self._processes.stage)
        self._messages.advise(self._snapshot, self._alarms.unbegun)
        if now - self._saved > SAVE_USAGE_EVERY_S:
            self._saved = now
            self._save_usage()

    def _take_snapshot(self) -> RunStatus:
        processes, root = self._processes.started(), self._folder.root
        status = with_ended_call(self._watch.status(), processes)
        return RunStatus(
            name=self._config.name,
            out=str(root),
            steps=self._config.steps,
            status=with_suspended(status, processes, partial(own_keys, self._folder)),
            url=self._watch.url(),
            elapsed_s=self._usage.wall_s(),
            metrics=self._metrics.lines(),
            nodes=tuple(sorted(self._watch.nodes, key=lambda node: node.name)),
            cheaters=self._alarms.announced(),
            heldout=self._processes.evaluations.results(),
            restarts={p.name: p.restarts for p in processes if p.restarts},
            notice=self._notice or full_disk(root) or self._silence(),
            evaluation_s=self._processes.evaluations.first_took_s,
            sample=self._samples.latest() if self._samples and self._processes.trainer else None,
            alarms=self._alarms.standing,
            hint=f"{root} · stopping" if self.supervisor.stop_requests else "",
        )

    def _silence(self) -> str:
        """What the view says while the coordinator does not answer; empty if it does. The status is then that of before."""
        now, coordinator = time.monotonic(), self._processes.coordinator
        self._answered = now if self._watch.answers else self._answered
        if self._processes.trainer is None or now - self._answered < WATCHDOG_S:
            return ""
        why = (
            suspended_process(coordinator.pid)
            or f"it is started again if its process ended; {coordinator.log} says more"
        )
        return f"the coordinator has not answered for {now - self._answered:.0f} s: {why}"

    def _shown(self) -> RunStatus:
        """The snapshot for the host, whose commands have the run's folder: strangers never read it. Steps of an earlier
        start get no lines before the coordinator has taken the run up. A run that is still evaluated has not ended."""
        lines = self._processes.trainer is None and not self._draws
        shot = replace(self._snapshot, metrics=()) if lines else self._snapshot
        phase, remedy = shot.status.phase, as_called(shot.status.remedy, self._folder.root)
        phase = "evaluating" if phase == "ended" and not self._processes.evaluations.last_is_done() else phase
        return replace(shot, status=msgspec.structs.replace(shot.status, phase=phase, remedy=remedy))

    def _fail_if_given_up(self) -> None:
        """Raise `StateError` if a role that the run needs was given up."""
        self._view.lost([self._processes.origin, *self._processes.onlookers])
        if (process := self._processes.needed_and_given_up()) is not None:
            for line in process.last_words(12):
                self._messages.say(f"{process.name} | {line}")
            raise StateError(as_called(f"{process.reason} (full log: {process.log})", self._folder.root))

    def _save_usage(self) -> None:
        self._usage.save({p.name: p.use_so_far() for p in self._processes.started()})

    # --- stopping ---

    def _settle(self) -> None:
        """End the workers and wait until their last submissions are judged, so that the figures of the end are final."""
        self._stop((self._processes.workers, WORKER_STOP_S))
        deadline = time.monotonic() + WORKER_STOP_S
        self._look(0.0)
        self._wait(
            "judging the last submissions",
            until=lambda: not self._snapshot.status.pending or time.monotonic() > deadline,
        )

    def _stop_roles(self, *last: ProcessGroup) -> None:
        """End workers first, then all else that asks the coordinator, then the coordinator and those that are `last`, such
        as the logger, for which the last evaluation is a row, too."""
        self._is_stopping, processes = True, self._processes
        self._prompts.end()
        self._stop((processes.workers, WORKER_STOP_S))
        self._stop((processes.askers(), STOP_S))
        self._stop(([processes.origin, processes.coordinator], STOP_S), *last)

    def _stop(self, *groups: ProcessGroup) -> None:
        group = [process for processes, _ in groups for process in processes]
        names = ", ".join(p.name for p in group if p.pid is not None)
        if names and self.supervisor.stop_requests:
            how = "at once" if self.supervisor.stop_requests > 1 else "(Ctrl-C again stops them at once)"
            self._notice = f"stopping {names} {how}"

        def look() -> None:
            for process in self._processes.started():
                process.tend()
            if self._processes.coordinator not in group:
                self._look()

        self.supervisor.stop(*groups, look=look)

    # --- the end ---

    def _say_stopped(self) -> int:
        done, steps, folder = self._snapshot.step, self._config.steps, str(self._folder.root)
        missing = "" if self._folder.summary.exists() else ". The same command makes the missing evaluation and summary"
        after = {
            "ended": f"The run has ended{missing}",
            "draining": "The same command drains the run to its end",
            "paused": "The same command starts its host again. The run stays paused until\n"
            f"`{command('admin', 'resume', folder)}`",
        }.get(self._snapshot.status.phase, "The same command resumes the run")
        self._view.say(f"Stopped at step {done} of {steps}.\n{after}.\nEverything is in {folder}")
        return EXIT_INTERRUPTED

    def _say_end(self, recipe: str) -> int:
        evaluations = self._processes.evaluations
        self._snapshot = replace(self._snapshot, notice="", heldout=evaluations.results())
        end = write_summary(self._folder, self._config, self._snapshot, self._usage)
        end = replace(end, recipe=recipe, hosted=not self._processes.with_workers)
        with contextlib.suppress(OSError):  # a picture for a README is not worth an error
            save_picture(Group(render(self._snapshot), render_end(end)), self._folder.root / "terminal.svg")
        self._view.end(render_end(end), plain_end(end))
        failed = evaluations.given_up()
        if failed is not None:
            raise StateError(f"the run ended, but an evaluation failed: {failed.reason} (full log: {failed.log})")
        return EXIT_DONE

"""`shoal watch`: the view of a run that somebody else started, from its folder or from its URL.

It reads and asks, starts nothing, locks nothing and writes nothing, so any number may watch one run, and a watcher that
leaves or is killed changes nothing. From a folder it sees what the host's own view shows; from a URL what anyone may see.
"""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console

from shoal.alarms import Alarm, standing_alarms
from shoal.errors import EXIT_DONE, EXIT_NO, EXIT_USER_ERROR, ShoalError
from shoal.evaluation_files import results_in
from shoal.ledger.log.writer import BrokenLog, UnknownRules
from shoal.net.client import Client
from shoal.net.server_address import living_pid, port_of_living
from shoal.protocol.messages import NodeState, Status
from shoal.run_folder import RunFolder, is_locked, is_url
from shoal.runs.log_source import demand_whole_log
from shoal.runs.remote_status import CoordinatorWatch, RemoteRun
from shoal.runs.rollout_samples import NewestSample, Samples
from shoal.runs.run_reader import open_run
from shoal.runs.run_status import (
    USAGE,
    RunStatus,
    own_keys,
    suspended_process,
    wall_s_before,
)
from shoal.step_metrics import MetricsFollower, clean_metrics
from shoal.terminal import as_called, printable
from shoal.views.terminal.keyboard import Keyboard, keyboard
from shoal.views.terminal.live_view import LiveView, draws_on, plain, plain_pause, print_lines, render

LOOK_EVERY_S = 1.0
KEY_WAIT_S = 0.1

LOG_WAIT_S = 3.0
"""The first picture of a run that nobody hosts waits so long for its log."""

READ_POLL_S = 0.1

READING = "Reading its log"

IN_STATUS = ("starved", "no_signal")
"""Alarms whose figures are in the line on what the run waits for."""

OVER = ("ended", "not hosted")
"""Phases in which nothing goes on."""


class RunSource(Protocol):
    """A run that can be looked at."""

    async def look(self) -> RunStatus:
        """The run now. Raises `ShoalError` if nothing was ever seen of it."""
        ...


class FolderWatch:
    """The run in a folder of this machine, hosted or not."""

    def __init__(self, root: Path) -> None:
        """Raises `StateError` if the folder has no run."""
        self._folder = RunFolder(root)
        self._config = self._folder.config()
        self._coordinator = CoordinatorWatch(self._folder.address, self._config.host.bind, is_reader=True)
        self._metrics = MetricsFollower(self._folder.metrics, clean_metrics)  # guard: cleaned-files
        self._samples = Samples(NewestSample(self._folder))
        self._log: _Log | None = None
        """Of a run that nobody hosts."""

    async def look(self) -> RunStatus:
        """See `RunSource`."""
        return await asyncio.to_thread(self._look)

    @property
    def exit_code(self) -> int:
        """EXIT_NO if its log has a fault, EXIT_USER_ERROR if it cannot be read."""
        return EXIT_DONE if self._log is None or self._log.is_reading else self._log.exit_code

    @property
    def is_reading(self) -> bool:
        """Whether more is shown once the log of a run that nobody hosts is read."""
        return self._log is not None and self._log.is_reading

    def _read_config(self) -> None:
        """Another start of the host may have changed the run file."""
        with contextlib.suppress(ShoalError):
            config = self._folder.config()
            if config.host.bind != self._config.host.bind:
                self._coordinator = CoordinatorWatch(self._folder.address, config.host.bind, is_reader=True)
            self._config = config

    def _look(self) -> RunStatus:
        self._read_config()
        config, folder, status = self._config, self._folder, self._coordinator.status()
        nodes = self._coordinator.nodes
        hosted, notice, remedy = self._coordinator.answers, "", ""
        if hosted:
            self._log = None
            status = msgspec.structs.replace(status, remedy=as_called(status.remedy, folder.root))
        else:
            self._log = self._log or _Log(folder.root)
            status, nodes = self._log.said() or (status, nodes)
            silent = _silence(folder)
            notice = f"{silent or 'nobody hosts this run now'}: this is what its folder has"
            if status.phase == "paused" and not silent:
                cause, remedy = _pause_of(status)
                notice += f". {cause}"
            if self._log.trouble:
                notice = f"{self._log.trouble}. {notice.capitalize()}"
            phase = "ended" if folder.summary.exists() else "silent" if silent else "not hosted"
            status = msgspec.structs.replace(status, phase=phase, waiting_for="", remedy="", in_flight=0)
        names = {f"cheater-{i}" for i in range(config.workers.cheating)}
        cheaters = own_keys(folder, names).values() or {node.key for node in nodes if node.name in names}
        return RunStatus(
            name=config.name, out=str(folder.root), steps=config.steps, status=status, url=self._coordinator.url(),
            elapsed_s=wall_s_before(folder.root / USAGE), metrics=self._metrics.lines(),
            nodes=nodes, cheaters=frozenset(cheaters),
            heldout=results_in(folder.evaluations), sample=self._samples.latest(),
            notice=notice, notice_remedy=remedy,
            alarms=[with_dated_figures(alarm) for alarm in standing_alarms(folder.alarms)],
            has_counts=self._log is None or self._log.said() is not None,
        )  # fmt: skip


def with_dated_figures(alarm: Alarm) -> Alarm:
    """An alarm whose figures are said to be those of when it was raised, if the status has these as they are now."""
    dated = f"when it was raised: {alarm.summary}"
    return msgspec.structs.replace(alarm, summary=dated) if alarm.cause in IN_STATUS else alarm


def _silence(folder: RunFolder) -> str:
    """Why the coordinator gives no answer of a run that has a host; empty if nobody hosts it."""
    if folder.summary.exists() or not is_locked(folder.root):
        return ""
    if (folder.checkpoints / "final").exists():
        return "the run has ended, and its host evaluates the final policy"
    if port_of_living(folder.address):
        why = f"though its process is there: see {folder.logs / 'coordinator.log'}"
        return f"the coordinator does not answer, {suspended_process(living_pid(folder.address)) or why}"
    return "its host is starting the coordinator, or stopping"


def _pause_of(status: Status) -> tuple[str, str]:
    """That a run is paused which nobody hosts, and why; and what its host may do."""
    if not status.pause_cause:
        return "It is paused: `shoal admin resume` goes on, once its host is started again", ""
    return f"It is paused and waits for {status.waiting_for}", f"Start its host again. {status.remedy}".rstrip()


class _Log:
    """What the log of a run says that nobody hosts: replayed once, in a thread, because a long one takes minutes."""

    def __init__(self, root: Path) -> None:
        self._said: tuple[Status, tuple[NodeState, ...]] | None = None
        self.trouble, self.exit_code = READING, EXIT_DONE
        self._thread = threading.Thread(target=self._read, args=(root,), name="log", daemon=True)
        self._thread.start()
        self._thread.join(LOG_WAIT_S)

    @property
    def is_reading(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    def said(self) -> tuple[Status, tuple[NodeState, ...]] | None:
        """Status and nodes; None before they are known."""
        return self._said

    def _read(self, root: Path) -> None:
        fault = "cannot be read"
        try:
            with open_run(root) as run:
                run.catch_up()
                self._said = run.condition().status, tuple(run.nodes())
                fault = "is not whole"
                if run.run and not is_locked(
                    root
                ):  # a run in one process has no log, and that of one that goes on grows
                    demand_whole_log(run.state, RunFolder(root))
                self.trouble = ""
        except ShoalError as error:
            self.trouble = f"Its log {fault}: {error}"
            is_read = fault == "is not whole" or isinstance(error, BrokenLog | UnknownRules)
            self.exit_code = EXIT_NO if is_read else EXIT_USER_ERROR


@contextlib.asynccontextmanager
async def opened(source: str) -> AsyncIterator[RunSource]:
    """The run at a URL or in a folder. Raises `ShoalError`."""
    if is_url(source):
        async with Client(source, on_wait=lambda line: None) as client:
            yield RemoteRun(client)
    else:
        yield FolderWatch(Path(source))


def watch(source: str, console: Console, once: bool = False) -> int:
    """Show the run until a key or Ctrl-C; piped, a line for each step until the run ends. `once`: as it is now. Returns the
    exit code: EXIT_NO if the run's log is broken, EXIT_USER_ERROR if it cannot be read.

    Raises `StateError`, and `PeerError` if the run's host does not answer.
    """
    if once:
        snapshot, code = asyncio.run(_look_once(source))
        if draws_on(console) and snapshot.has_counts:
            console.print(render(replace(snapshot, hint=snapshot.out)))
        else:
            alarms = [alarm.in_words for alarm in snapshot.alarms]
            said = plain(replace(snapshot, notice="")), snapshot.notice_in_words or plain_pause(snapshot), *alarms
            for line in filter(None, said):
                print_lines(console, printable(line))
        return code
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(_watch(source, console))
    except KeyboardInterrupt:
        return EXIT_DONE  # the picture is gone, and the run goes on
    finally:
        signal.signal(signal.SIGTERM, before)


async def _look_once(source: str) -> tuple[RunStatus, int]:
    async with opened(source) as run:
        snapshot = await run.look()
        if not isinstance(run, FolderWatch) or not run.is_reading:
            return snapshot, _code(run)
        # A script wants all of it. Ctrl-C ends the waiting, and the thread with the process.
        print("reading the log of this run: a long one takes minutes", file=sys.stderr, flush=True)
        while run.is_reading:  # noqa: ASYNC110  a thread ends, and sets no event of the loop
            await asyncio.sleep(READ_POLL_S)
        return await run.look(), _code(run)


def _code(run: RunSource) -> int:
    return run.exit_code if isinstance(run, FolderWatch) else EXIT_DONE


async def _watch(source: str, console: Console) -> int:
    async with opened(source) as run:
        first = await run.look()
        view = LiveView(console)
        try:
            with keyboard() as keys:
                await follow(run, first, view, keys, piped=not view.is_picture)
        finally:
            view.close()
        return _code(run)


async def follow(run: RunSource, first: RunStatus, view: LiveView, keys: Keyboard, piped: bool) -> None:
    """Show one snapshot after another until `q`; piped, until the run ends or nobody hosts it."""
    snapshot, looked = first, time.monotonic()
    size = view.size
    view.show(_with_hint(snapshot))
    while "q" not in (await asyncio.to_thread(keys.pressed, KEY_WAIT_S)).lower():
        if piped and snapshot.status.phase in OVER and not snapshot.notice.startswith(READING):
            view.say(printable(snapshot.notice_in_words or "the run has ended"))
            return
        await asyncio.sleep(0.0 if keys.is_there else KEY_WAIT_S)
        if time.monotonic() - looked >= LOOK_EVERY_S:
            snapshot, looked = await run.look(), time.monotonic()
        elif view.size == size:
            continue
        size = view.size
        view.show(_with_hint(snapshot))


def _with_hint(snapshot: RunStatus) -> RunStatus:
    return replace(snapshot, hint="q leaves" if snapshot.status.phase in OVER else "q leaves; the run goes on")

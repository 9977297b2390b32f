"""A run that nobody watches, such as that of a stage: where others would wait for their host, it ends and says why.

It is a view of the launcher: it reads snapshots and raises what ends the run. A run that paused itself before goes on when
it is started again, for as many groups as it had. A person who pauses it is waited for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from shoal.errors import StateError
from shoal.launch.admin import administer
from shoal.launch.local_run import open_local_run
from shoal.ledger.fault_rate import FAULTS, fault_remedy
from shoal.ledger.remedies import IN_A_NEW_RUN
from shoal.ledger.run_events import NO_SIGNAL
from shoal.protocol.messages import AdminRequest, Status
from shoal.protocol.rollout_validation import unbegun_remedy
from shoal.run_folder import RunFolder
from shoal.runs.remote_status import CoordinatorWatch
from shoal.runs.rollout_samples import why_paused
from shoal.runs.run_status import RunStatus
from shoal.views.terminal.live_view import LiveView, RunView

IDLE_LIMIT_S = 1800.0
"""A run whose workers have no lease for so long has lost them. The longest quarantine is an hour, and the same command then
goes on."""


def launch_unattended(run_dir: Path, lock_fd: int) -> int:
    """As `launch` of `launch/local_run`, with its workers. Raises `StateError` also if the run waits for a person or a
    node."""
    folder = RunFolder(run_dir)
    view = UnattendedView(LiveView(Console()), folder)
    local_run = open_local_run(run_dir, lock_fd, True, lambda: view)
    with local_run.supervisor.counted_signals():
        return local_run.run(view.resume)


class UnattendedView:
    """Another view, which also ends the run."""

    def __init__(self, view: RunView, folder: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._view, self._folder, self._clock = view, folder, clock
        self._resumed_at = -1
        """Accepted groups when a pause of its own was last ended; a status of before may come later."""
        self._seen: tuple[int, ...] = ()
        self._idle_since = clock()
        self._shown_with_cause = 0

    def resume(self, url: str) -> str:
        """Let a run go on that paused itself when it was last up; returns what to say. The coordinator answers by now."""
        status = CoordinatorWatch(self._folder.address, self._folder.config().host.bind).status()
        if not status.pause_cause or status.phase != "paused":
            return ""
        self._resumed_at = status.accepted
        administer("resume", str(self._folder.root), AdminRequest(), None)
        return "The run had paused itself. It was started again, so it goes on."

    def show(self, snapshot: RunStatus) -> None:
        self._view.show(snapshot)
        cause = self._cause(snapshot.status, snapshot.metrics)
        if not cause:
            self._shown_with_cause = 0
            return
        self._shown_with_cause += 1
        if (
            self._shown_with_cause == 2
        ):  # after the first the launcher shows rollouts, after this one it stops the roles
            raise StateError(cause)

    def _cause(self, status: Status, lines: Sequence[Mapping[str, Any]]) -> str:
        """Why the run cannot go on by itself; empty if it can."""
        paused = status.phase == "paused" and status.pause_cause and status.accepted > self._resumed_at
        if paused and status.pause_cause.startswith(FAULTS):
            remedy = fault_remedy(status.pause_cause)
            return f"the run paused itself ({status.pause_cause}). {remedy}, or type the same command again"
        if paused and status.pause_cause != NO_SIGNAL:
            return (
                f"the {status.pause_cause} paused the run, as [monitors.actions] says: {self._folder.alarms} has its "
                "figures. Change what led to it and begin anew, or type the same command again, which goes on"
            )
        if paused:  # guard: unattended-run-ends-when-paused
            why = why_paused(self._folder, lines, status.flat_reward).replace(IN_A_NEW_RUN, ", in a new run")
            change = why or "Start from a better policy, or change the task"
            if status.unbegun_groups > status.flat_groups / 2:
                change = f"{unbegun_remedy(status.unbegun_cause)}, in a new run"
            return (
                f"the run paused itself ({status.pause_cause}): {status.no_signal}. {change}. Or type the same command "
                "again, which gives the run as many groups more (rollouts.max_flat_groups)"
            )
        seen = (status.version, status.accepted, sum(status.refused.values()), status.in_flight, status.pending)
        waits = status.phase == "running" and status.waiting_on == "workers" and not seen[-1] and not seen[-2]
        if seen != self._seen or not waits:
            self._seen, self._idle_since = seen, self._clock()
        if self._clock() - self._idle_since > IDLE_LIMIT_S:  # guard: unattended-run-ends-without-workers
            return (
                f"no worker has had a lease for {IDLE_LIMIT_S / 60:.0f} minutes, and the run waits for "
                f"{status.wait_in_words}. The logs in {self._folder.logs} say more; the same command goes on"
            )
        return ""

    def say(self, line: str, passes: bool = False) -> None:
        if line:
            self._view.say(line, passes)

    def end(self, picture: RenderableType, text: str) -> None:
        self._view.end(picture, text)

    def close(self) -> None:
        self._view.close()

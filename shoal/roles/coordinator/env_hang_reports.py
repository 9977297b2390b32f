"""What workers say of calls of environments that they stopped: for the host's log and for what the run waits for.

It is a stranger's word: short, attributed, and it decides nothing. That a block was stopped, and how often, is in the log.
"""

import logging
from typing import Any

from shoal.ledger.batch_selection import is_fresh
from shoal.ledger.state import State, once_per_event
from shoal.ledger.state_records import LeaseRecord, StopsRecord, StreamRecord
from shoal.protocol.messages import LeaseRequest
from shoal.terminal import quote

log = logging.getLogger("coordinator")

MAX_REPORTS = 1000
"""Reports that are remembered. Each is logged once; of more, some are logged again."""


class StopReports:
    """The newest report on each block, since the coordinator started."""

    def __init__(self) -> None:
        self._newest = dict[tuple[int, int], str]()
        """By version and block."""
        self._logged = dict[str, None]()

    def add(self, lease: LeaseRecord, name: str, request: LeaseRequest, tasks: str) -> None:
        """Keep what the worker of a lease, which has this name, says of the block that it stopped, and log it once."""
        words = request.said or "nothing of what happened"
        report = f"worker {quote(name)} ({lease.worker[:12]}) says {quote(words)}"
        _make_room(self._newest)
        _make_room(self._logged)
        self._newest[lease.version, request.stopped] = report
        if (line := f"{report}, in {tasks}") not in self._logged:
            self._logged[line] = None
            log.warning("an environment was stopped: %s", line)

    def newest(self, version: int, block: int) -> str:
        """What a worker says of a block, and which worker."""
        return self._newest.get((version, block), "nobody has said more since the coordinator started")

    def waited_for(self, state: State, stream: StreamRecord) -> str:
        """What to say of blocks that were stopped and are still to be made; empty if there are none."""
        found = _stopped_blocks(state, stream)
        if not found or state.phase == "ended":
            return ""
        version, number, stops = max(found, key=lambda one: (len(one[2].workers), one[:2]))
        times, others = len(stops.workers), len(found) - 1
        remedy = (
            "If that goes on, correct the environment (`shoal env check` tries it), or begin a new run without its "
            "[[envs]] if there are others"
        )
        return (
            f"block {number} of version {version} ({stops.tasks or 'its tasks are not named'}) was given back "
            f"{'once' if times == 1 else f'{times} times'} by workers, who say that a call of its "
            f"environment took too long or ended its process{f', as did {others} more' if others else ''}: "
            f"{self.newest(version, number)}"
            f"{'' if state.phase == 'paused' else f'. {remedy}'}"
        )


@once_per_event
def _stopped_blocks(state: State, stream: StreamRecord) -> list[tuple[int, int, StopsRecord]]:
    """(version, block, its stops) of the blocks that were stopped and are still to be made."""
    return [
        (version, number, block.stopped)
        for version in stream.versions
        if is_fresh(state, stream, version)
        for number, block in stream.versions[version].blocks.items()
        if block.stopped and block.status in ("free", "leased")
    ]


def _make_room(reports: dict[Any, Any]) -> None:
    if len(reports) >= MAX_REPORTS:  # guard: reports-are-bounded
        del reports[next(iter(reports))]

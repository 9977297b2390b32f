"""The coordinator's connection to the stage, which plays the environments of a run whose workers only extend token ids.

It decodes what both sides say and limits how much is asked at a time. It does not deal with environments. If the stage does
not answer, workers are told to ask again.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shoal.errors import PeerError
from shoal.ledger.errors import Refused
from shoal.ledger.remedies import ENDED_CALLS
from shoal.ledger.state_records import LeaseRecord
from shoal.net.client import Client, PeerRefused
from shoal.net.server import RequestRefused
from shoal.net.server_address import told_address
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_SUBMISSION_BYTES
from shoal.protocol.signing import Key

MAX_WORKER_TURNS = 16
"""Turns of one worker that are answered at a time. It may play this many blocks at once."""

MAX_TURNS = 256
"""Turns of all workers that are answered at a time. For one more the coordinator answers 503."""

STAGE_S = 25.0
"""How long the stage may take. It always answers sooner, if only to say that it is still at work."""

SLOW_TURN_S = 15.0
"""The host hears of a turn that takes longer. One that its worker has not asked for again for a minute is forgotten."""

HOST_HUNG_SHARE = 0.5
"""Share of a lease's time, to its deadline. A stage that takes more has let the lease lapse: its worker pays nothing. With
less, the worker had the other half, and deadlines allow several times what a worker usually takes."""

AGAIN_S = 5.0
"""A worker that is told to ask again does so sooner: the stage is at work meanwhile."""

QUESTION_S = 1.0
"""An answer that comes sooner takes no time: a worker that asks often, or wrongly, makes nobody hang."""

RECORD = -1
"""In place of a block: the record of a lease."""

T = TypeVar("T")

log = logging.getLogger("coordinator")


@dataclass
class StageTime:
    """How long the stage has been at work for one block of a lease."""

    total_s: float = 0.0
    until: float = 0.0
    """Time before this counts no more: what two questions take at the same time counts once."""
    is_busy: bool = False
    """Whether the last answer that took long was to ask again."""
    asked: list[float] = field(default_factory=list)
    """When the questions without an answer were asked."""

    def begin(self, now: float) -> None:
        self.asked.append(now)

    def end(self, began: float, now: float, busy: bool) -> None:
        self.asked.remove(began)
        if now - began >= QUESTION_S:  # guard: quick-answers-are-no-hang
            self.total_s, self.until, self.is_busy = self.total_s + self._more(began, now), now, busy

    def seconds(self, now: float) -> float:
        """So far, with the oldest question that has no answer."""
        began = min(self.asked, default=now)
        return self.total_s + (self._more(began, now) if now - began >= QUESTION_S else 0.0)

    def _more(self, began: float, now: float) -> float:
        goes_on = self.is_busy and began - self.until < AGAIN_S
        return now - (self.until if goes_on else max(began, self.until))


def tasks_text(block: t.Block) -> str:
    """What to call the tasks of a block: the first, and how many more."""
    first, *more = dict.fromkeys((slot.task, slot.env) for slot in block.slots)
    return f"task {first[0]} of {first[1][:150]}{f' and {len(more)} more' if more else ''}"


class EnvServerClient:
    """Requests to the stage, signed with the run key."""

    def __init__(self, address: Path, key: Key, run: str, connect: Callable[[str], Client] | None = None) -> None:
        """`address` is the file in which the stage says where it is. `connect` makes a client of a URL."""
        self._address, self._run = address, run
        self._connect = connect or (lambda url: Client(url, key, run=run))
        self._client: Client | None = None
        self._asking: Counter[str] = Counter()
        self._trouble = ""
        self._turns = dict[tuple[str, int], tuple[float, float, str]]()
        """Of turns without an answer, by lease and block: when they were asked for first, and last, and their tasks."""
        self._spent: dict[str, dict[int, StageTime]] = {}
        """By lease, and then by block; -1 is the record."""
        self._last_s = dict[str, float]()
        """By lease, what it had spent at the last tick."""
        self._stage_s = dict[str, float]()
        """By lease, how long the stage was at work for its worker while it was open."""

    async def turn(self, asked: t.Staged, cap: int) -> t.TurnAnswer:
        """The answer to a turn. Raises `RequestRefused` as the stage does, and 503 if it is not there."""
        now, place = time.monotonic(), (asked.lease, asked.blocks[0].index)
        self._turns = {one: times for one, times in self._turns.items() if now - times[1] < 60.0}
        self._turns[place] = (self._turns[place][0] if place in self._turns else now, now, tasks_text(asked.blocks[0]))
        try:
            with self._timed(*place):
                answer = await self._ask("/v1/turns", asked, t.TurnAnswer, cap)
        except RequestRefused as refused:
            if refused.status != 503:  # it has an answer
                self._turns.pop(place, None)
            raise
        self._turns.pop(place, None)
        return answer

    def slow_turn(self) -> str:
        """What to say of the turn that the stage has played for longest; empty if none takes long."""
        now = time.monotonic()
        times = [(now - first, tasks) for first, last, tasks in self._turns.values() if now - last < 60.0]
        longest_s, tasks = max(times, default=(0.0, ""))
        if not times or longest_s < SLOW_TURN_S:
            return ""
        return (
            f"the host's stage: one answer takes {longest_s:.0f} s so far, with all its tries, in {tasks}. An environment "
            f"or the machine is slow, or a call hangs: {ENDED_CALLS}"
        )

    async def record(self, asked: t.Staged) -> t.Record:
        """The record of a lease whose rollouts have all ended. Raises as `turn`."""
        with self._timed(asked.lease, RECORD):
            return await self._ask("/v1/records", asked, t.Record, MAX_SUBMISSION_BYTES)

    def host_hung(self, leases: Iterable[LeaseRecord]) -> tuple[str, ...]:
        """Of the open leases, those of whose time, from grant to deadline, the stage has taken half or more: for them, or
        for another lease of the same worker meanwhile. A worker that does not ask takes its own time. Called at each tick;
        it forgets leases that are not given."""
        open_ = {lease.id: lease for lease in leases}
        self._spent = {name: spent for name, spent in self._spent.items() if name in open_}
        seconds = {name: self._seconds(spent) for name, spent in self._spent.items()}
        newest = dict[str, float]()
        for name, total in seconds.items():
            worker = open_[name].worker
            newest[worker] = max(newest.get(worker, 0.0), total - self._last_s.get(name, 0.0))
        self._last_s = seconds
        self._stage_s = {
            name: self._stage_s.get(name, 0.0) + newest.get(lease.worker, 0.0)  # guard: held-ahead-is-held-up
            for name, lease in open_.items()
        }
        return tuple(
            name
            for name, lease in open_.items()
            if self._stage_s[name] >= HOST_HUNG_SHARE * (lease.deadline - lease.issued)
        )

    def _seconds(self, spent: dict[int, StageTime]) -> float:
        """Of one lease: its blocks are played beside each other, and its record is made at last."""
        now = time.monotonic()
        blocks = max((one.seconds(now) for block, one in spent.items() if block != RECORD), default=0.0)
        return blocks + (spent[RECORD].seconds(now) if RECORD in spent else 0.0)

    @contextlib.contextmanager
    def _timed(self, lease: str, block: int) -> Iterator[None]:
        """To hold around a question to the stage: add the time that it takes to that of the block."""
        spent = self._spent.setdefault(lease, {}).setdefault(block, StageTime())
        began, busy = time.monotonic(), False
        spent.begin(began)
        try:
            yield
        except RequestRefused as refused:
            busy = refused.status == 503
            raise
        finally:
            spent.end(began, time.monotonic(), busy)

    @contextlib.contextmanager
    def place(self, worker: str) -> Iterator[None]:
        """To hold around one turn of a worker. Raises `Refused` if too many are being answered."""
        own, all_ = self._asking[worker], self._asking.total()
        if own >= MAX_WORKER_TURNS or all_ >= MAX_TURNS:  # guard: turns-at-a-time
            raise Refused("busy", f"{own} turns of this worker (limit {MAX_WORKER_TURNS}), and {all_} of all (limit "
                          f"{MAX_TURNS}), are being answered: ask again in a moment")  # fmt: skip
        self._asking[worker] += 1
        try:
            yield
        finally:
            self._asking[worker] -= 1
            self._asking += Counter()  # drops workers that ask nothing

    async def _ask(self, path: str, asked: t.Staged, kind: type[T], cap: int) -> T:
        try:
            return await self._reached().post_packed(path, asked, kind, cap=cap, deadline_s=STAGE_S)
        except PeerRefused as refused:
            raise RequestRefused(refused.status, refused.code, refused.reason) from None
        except PeerError as trouble:
            if str(trouble) != self._trouble:
                self._trouble = str(trouble)
                log.warning("the stage gives no answer: %s", trouble)  # its address is of no use to a stranger
            # guard: no-stage-is-no-refusal
            raise RequestRefused(503, "busy", "the host's stage gives no answer now", retry_s=1.0) from None

    def _reached(self) -> Client:
        """A client of the stage where it is now: it comes back at another port when it was killed."""
        if not (url := told_address(self._address).url):
            raise PeerError("it has not started yet")
        if self._client is None or self._client.base_url != url:
            self._client = self._connect(url)  # an old one may have requests under way, which fail by themselves
        return self._client

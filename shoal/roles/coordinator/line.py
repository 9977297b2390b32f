"""The line of polls for a lease: which of them ask the rules again, and when.

Called by `api` for each poll and by the book after each commit. A crowd of waiting workers must cost a commit nothing:
only as many polls are called as there are blocks to give, first come first served. A call is a chance to ask, and the
rules decide: a poll that is called and gets nothing, or whose worker has gone, passes its call on to the next.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shoal.ledger.entry import Body, Entry
from shoal.ledger.facts.batches import BatchFormed, SlotVoid
from shoal.ledger.facts.leases import LeaseGranted, LeaseLapsed
from shoal.ledger.facts.members import NodeQuarantined, NodeRestored
from shoal.ledger.facts.run import RulesChanged, RunEnded
from shoal.ledger.facts.submissions import SubmissionReceived
from shoal.ledger.facts.verdicts import Decision
from shoal.ledger.facts.versions import CheckpointPublished
from shoal.ledger.log.book import Book
from shoal.ledger.rules.leases import blocks_to_give
from shoal.ledger.state import State
from shoal.protocol.constants import LONG_POLL_S

LEAST_RETRY_S = 0.1
"""A poll that could not use the block it was called for is not called again before this, unless something changes."""

KEPT_S = 2 * LONG_POLL_S
"""A worker whose poll ended without a lease keeps its number if it asks again within this."""

_FOR_ALL = (RulesChanged, RunEnded)
"""Events that every poll is told of at once: a pause, an end, a worker that is kicked."""

_FOR_THOSE_ASIDE = (BatchFormed, CheckpointPublished, NodeQuarantined, SlotVoid)
"""Events that may end what kept workers from using a block."""


class Line:
    """All polls of a coordinator that wait for a lease."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._numbers = itertools.count()
        self._polls: dict[str, list[Place]] = {}
        """By worker."""
        self._waiting: dict[int, Place] = {}
        """To be called when there are blocks, by number."""
        self._aside: dict[int, Place] = {}
        """Not to be called for a while, by number: there were blocks, and the rules gave them none."""
        self._called = 0
        """Polls that were called and have not asked yet."""
        self._left: dict[str, tuple[int, float]] = {}
        """Numbers of workers whose last poll ended without a lease, and when it did: oldest first."""
        book.watch(self._committed)

    @contextmanager
    def place(self, key: str) -> "Iterator[Place]":
        """The place of a worker's poll, for as long as the poll lasts."""
        number, left_at = self._left.pop(key, (-1, 0.0))
        if number < 0 or time.monotonic() - left_at > KEPT_S:
            number = next(self._numbers)
        place = Place(self, key, number)
        self._polls.setdefault(key, []).append(place)
        try:
            yield place
        finally:
            self._leave(place)

    def nobody_waits(self) -> bool:
        """Whether a newcomer may ask at once."""
        return not self._waiting and not self._called  # guard: no-overtaking

    def step_up(self, place: "Place", aside_s: float | None) -> None:
        """Put a poll that got nothing in its place in the line, or aside for a while, and call the next."""
        self._end_call(place)
        # guard: useless-block-passes-on
        if aside_s is not None and blocks_to_give(self._book.state, self._book.state.main) > 0:
            self._aside[place.number] = place
            place.timer = asyncio.get_running_loop().call_later(max(LEAST_RETRY_S, aside_s), self._back_in_line, place)
        else:
            self._waiting[place.number] = place
        self._call_next()

    def step_out(self, place: "Place") -> None:
        """Take a poll out of the line: it asks now, or ends."""
        self._waiting.pop(place.number, None)
        if self._aside.pop(place.number, None) is not None:
            place.timer.cancel()

    def _leave(self, place: "Place") -> None:
        self.step_out(place)
        self._end_call(place)
        polls = self._polls[place.key]
        polls.remove(place)
        if not polls:
            del self._polls[place.key]
        if place.has_waited and not place.served:
            self._remember(place)  # guard: place-in-line
        self._call_next()  # guard: call-passes-on

    def _remember(self, place: "Place") -> None:
        now = time.monotonic()
        self._left.pop(place.key, None)
        self._left[place.key] = (place.number, now)
        while now - next(iter(self._left.values()))[1] > KEPT_S:
            del self._left[next(iter(self._left))]

    def _end_call(self, place: "Place") -> None:
        self._called -= place.called
        place.called = False

    def _call_next(self) -> None:
        """Call as many polls as there are blocks for which none is called yet."""
        spare = blocks_to_give(self._book.state, self._book.state.main) - self._called if self._waiting else 0
        if spare > 0:
            # guard: wake-as-many-as-blocks, wake-the-longest-waiting
            self._call([self._waiting[number] for number in heapq.nsmallest(spare, self._waiting)])

    def _call(self, places: "Iterable[Place]") -> None:
        for place in places:
            if place.bell is not None and not place.bell.done():
                self.step_out(place)
                self._called += not place.called
                place.called = True
                place.bell.set_result(None)

    def _back_in_line(self, place: "Place") -> None:
        self.step_out(place)
        self._waiting[place.number] = place
        self._call_next()

    def _committed(self, entries: list[Entry]) -> None:
        for body in (entry.body for entry in entries):
            if isinstance(body, _FOR_ALL):  # guard: end-is-for-all
                self._call([*self._waiting.values(), *self._aside.values()])
            if isinstance(body, _FOR_THOSE_ASIDE):
                back = list(self._aside.values())
            else:
                polls = self._polls.get(_worker_of(body, self._book.state), [])
                if isinstance(body, LeaseGranted):  # another poll of the worker may be the one that it still reads
                    for place in polls:
                        place.served = True
                    self._call(polls)
                back = [place for place in polls if place.number in self._aside]
            for place in back:
                self.step_out(place)
                self._waiting[place.number] = place
        self._call_next()


class Place:
    """One poll's place."""

    def __init__(self, line: Line, key: str, number: int) -> None:
        self._line = line
        self.key, self.number = key, number
        self.called = self.has_waited = self.served = False
        self.bell: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle
        self._took_turn = False

    def may_take(self) -> bool:
        """Whether it is this poll's turn to take a block."""
        self._took_turn = self.called or self._line.nobody_waits()
        return self._took_turn

    async def wait(self, retry_s: float, left_s: float) -> None:
        """Return when this poll is called, or after `left_s`. `retry_s` is what the rules said when it asked last."""
        self.has_waited = True
        self.bell = asyncio.get_running_loop().create_future()
        self._line.step_up(self, retry_s if self._took_turn else None)
        try:
            async with asyncio.timeout(left_s):
                await self.bell
        except TimeoutError:
            pass
        finally:
            self._line.step_out(self)


def _worker_of(body: Body, state: State) -> str:
    """The worker whose own leases or standing an event changes, or "" for other events."""
    match body:
        case LeaseGranted(worker=key) | SubmissionReceived(worker=key) | NodeRestored(node=key):
            return key
        case LeaseLapsed(lease=lease):
            return state.leases[lease].worker
        case Decision(submission=submission):
            return state.leases[state.submissions[submission].lease].worker
        case _:
            return ""

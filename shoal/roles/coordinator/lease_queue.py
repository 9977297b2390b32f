"""The line of polls that wait for a lease: which of them may ask the rules again, and when.

A commit must not become slow when many workers wait, so it calls only as many polls as there are blocks to give, those that
came first. A poll that is called may ask, and the rules decide. If it gets nothing, or if its worker has gone, the next
poll is called.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from shoal.ledger.batches import BatchFormed, SlotVoid
from shoal.ledger.errors import Refused
from shoal.ledger.event import Body, Entry
from shoal.ledger.lease_granting import blocks_to_give
from shoal.ledger.leases import LeaseGranted, LeaseLapsed
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.members import NodeQuarantined, NodeRestored, member_as, refuse_replayed
from shoal.ledger.run_events import RulesChanged, RunEnded
from shoal.ledger.state import State
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.verdicts import Decision
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol.constants import KEY_REQUESTS_PER_S, LONG_POLL_S
from shoal.protocol.signing import Caller

LEAST_RETRY_S = 0.1
"""How long a poll that could not use a block is left aside at least, unless something changes for it."""

KEPT_S = 2 * LONG_POLL_S
"""A worker whose poll ended without a lease keeps its place in the line if it asks again within this time."""

LOOK_S = 1.0
"""While polls wait, the line looks this often whether a block has become late."""

_FOR_ALL = (RulesChanged, RunEnded)
"""Events after which all polls ask at once: the run is paused or ends, or a worker is kicked."""

_FOR_THOSE_ASIDE = (BatchFormed, CheckpointPublished, NodeQuarantined, SlotVoid)
"""Events after which polls that were left aside may be able to use a block."""


class LeaseQueue:
    """All polls of a coordinator that wait for a lease."""

    def __init__(self, log_writer: LogWriter, clock: Callable[[], float]) -> None:
        self._log_writer, self._clock = log_writer, clock
        self._numbers = itertools.count()
        self._polls: dict[str, list[WaitingPoll]] = {}
        """Polls of each worker, by its key."""
        self._waiting: dict[int, WaitingPoll] = {}
        """Polls to call when there are blocks, by number."""
        self._aside: dict[int, WaitingPoll] = {}
        """Polls not to call for a while, by number: there were blocks, but the rules gave them none."""
        self._called = 0
        """How many polls were called and have not asked yet."""
        self._left: dict[str, tuple[int, float]] = {}
        """By worker whose last poll ended without a lease: its number, and when the poll ended. Oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        """The next look, while polls wait."""
        log_writer.watch(self._committed)

    @contextmanager
    def place(self, key: str) -> "Iterator[WaitingPoll]":
        """Give a worker's poll a place in the line for as long as the poll lasts."""
        number, left_at = self._left.pop(key, (-1, 0.0))
        if number < 0 or time.monotonic() - left_at > KEPT_S:
            number = next(self._numbers)
        place = WaitingPoll(self, key, number)
        self._polls.setdefault(key, []).append(place)
        try:
            yield place
        finally:
            self._leave(place)

    def nobody_waits(self) -> bool:
        """Whether a newcomer may ask at once."""
        return not self._waiting and not self._called  # guard: no-overtaking

    def wait_again(self, place: "WaitingPoll", aside_s: float | None) -> None:
        """Put a poll that got nothing back into the line, or aside for a while, and call the next."""
        self._end_call(place)
        # guard: useless-block-passes-on
        if aside_s is not None and self._blocks() > 0:
            self._aside[place.number] = place
            place.timer = asyncio.get_running_loop().call_later(max(LEAST_RETRY_S, aside_s), self._back_in_line, place)
        else:
            self._waiting[place.number] = place
        self._call_next()

    def step_out(self, place: "WaitingPoll") -> None:
        """Take a poll out of the line: it asks now, or ends."""
        self._waiting.pop(place.number, None)
        if self._aside.pop(place.number, None) is not None:
            place.timer.cancel()

    def _leave(self, place: "WaitingPoll") -> None:
        self.step_out(place)
        self._end_call(place)
        polls = self._polls[place.key]
        polls.remove(place)
        if not polls:
            del self._polls[place.key]
        if place.has_waited and not place.served:
            self._remember(place)  # guard: place-in-line
        self._call_next()  # guard: call-passes-on

    def _remember(self, place: "WaitingPoll") -> None:
        now = time.monotonic()
        self._left.pop(place.key, None)
        self._left[place.key] = (place.number, now)
        while now - next(iter(self._left.values()))[1] > KEPT_S:
            del self._left[next(iter(self._left))]

    def _end_call(self, place: "WaitingPoll") -> None:
        self._called -= place.called
        place.called = False

    def _call_next(self) -> None:
        """Call a poll for each block for which none is called yet."""
        spare = self._blocks() - self._called if self._waiting else 0
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)  # guard: late-wakes-the-line
        if spare > 0:
            # guard: wake-as-many-as-blocks, wake-the-longest-waiting
            self._call([self._waiting[number] for number in heapq.nsmallest(spare, self._waiting)])

    def _blocks(self) -> int:
        return blocks_to_give(
            self._log_writer.state, self._log_writer.state.main, max(self._log_writer.state.time, self._clock())
        )

    def _look_again(self) -> None:
        """Time alone makes a block late, without an event."""
        self._timer = None
        self._call_next()

    def _call(self, places: "Iterable[WaitingPoll]") -> None:
        for place in places:
            if place.bell is not None and not place.bell.done():
                self.step_out(place)
                self._called += not place.called
                place.called = True
                place.bell.set_result(None)

    def _back_in_line(self, place: "WaitingPoll") -> None:
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
                polls = self._polls.get(_worker_of(body, self._log_writer.state), [])
                if isinstance(body, LeaseGranted):  # it may have closed the poll that was granted the lease
                    for place in polls:
                        place.served = True
                    self._call(polls)
                back = [place for place in polls if place.number in self._aside]
            for place in back:
                self.step_out(place)
                self._waiting[place.number] = place
        self._call_next()


class WaitingPoll:
    """One poll's place."""

    def __init__(self, line: LeaseQueue, key: str, number: int) -> None:
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
        """Return when this poll is called, or after `left_s`. `retry_s` is what the rules told it when it last asked."""
        self.has_waited = True
        self.bell = asyncio.get_running_loop().create_future()
        self._line.wait_again(self, retry_s if self._took_turn else None)
        try:
            async with asyncio.timeout(left_s):
                await self.bell
        except TimeoutError:
            pass
        finally:
            self._line.step_out(self)


def _worker_of(body: Body, state: State) -> str:
    """The worker whose leases or standing an event changes; "" for other events."""
    match body:
        case LeaseGranted(worker=key) | SubmissionReceived(worker=key) | NodeRestored(node=key):
            return key
        case LeaseLapsed(lease=lease):
            return state.leases[lease].worker
        case Decision(submission=submission):
            return state.leases[state.submissions[submission].lease].worker
        case _:
            return ""


# --- replays of requests for leases ---
#
# A worker's key signs each poll once, so the same request a second time comes from a proxy that repeats requests, or from
# an attacker. It gets the lease that the poll got, or is told to come back; an older poll is refused. This is in memory
# alone: after a restart, each poll of the last SIGNATURE_WINDOW_S seconds that its key signed after its latest join or
# leave may get one lease again. What the log holds stays refused.


class Poll:
    """One signed request for a lease, however often it arrives."""

    def __init__(self) -> None:
        self.lease = ""
        """The lease that it got."""
        self.over = False
        """Whether it was answered, or its sender has gone."""


class LeasePollReplays:
    """The polls that each worker signed in its latest second."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, dict[str, Poll]]] = {}
        """By key: when it signed, and its polls of that second by nonce."""

    @contextmanager
    def poll(self, caller: Caller, state: State) -> Iterator[Poll]:
        """The poll that a request is, for as long as its answer takes. Raises `Refused`."""
        member = member_as(state, caller.key, "worker")  # strangers take no memory
        refuse_replayed(caller.created, member.signed, changes=False)  # guard: poll-from-before-the-join
        self.refuse_older(caller)
        if caller.key not in self._latest or caller.created > self._latest[caller.key][0]:
            self._latest[caller.key] = (caller.created, {})
        polls = self._latest[caller.key][1]
        if len(polls) >= KEY_REQUESTS_PER_S and caller.nonce not in polls:  # guard: polls-of-a-second
            raise Refused("replayed", f"more than {KEY_REQUESTS_PER_S:.0f} requests for a lease are signed at "
                          f"{caller.created}: sign it again in a second")  # fmt: skip
        poll = polls.setdefault(caller.nonce, Poll())
        try:
            yield poll
        finally:
            poll.over = True

    def refuse_older(self, caller: Caller) -> None:
        """Refuse a request that was signed before the key's latest poll. Raises `Refused`."""
        created, _ = self._latest.get(caller.key, (0, {}))
        refuse_replayed(caller.created, created, changes=False)  # guard: old-poll

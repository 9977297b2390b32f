"""The context of a request: the coordinator's parts, the caller, and the limits of requests that wait."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from shoal.ledger.errors import Refused
from shoal.ledger.event import Entry
from shoal.ledger.event_types import read_entry
from shoal.ledger.log.sqlite_store import Store
from shoal.ledger.remedies import SAYS_FORK
from shoal.net import server
from shoal.net.server import Gate
from shoal.protocol.constants import MAX_EVENTS, MAX_EVENTS_BYTES, SMALL_BODY_BYTES
from shoal.protocol.signing import Caller, content_digest
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.lease_queue import LeasePollReplays, LeaseQueue
from shoal.roles.coordinator.prometheus import PrometheusCollector
from shoal.roles.coordinator.relay_challenges import crowd_of
from shoal.roles.coordinator.status import StatusCache

# --- pages of the log ---
#
# A page may have megabytes, and strangers may ask for many at once and read slowly. So a page is read twice: once for its
# size and digest, one page at a time, and once more while it is sent, in parts. The log only grows.


PART_BYTES = 1 << 16
"""A part ends with the event that brings it to this size. It is what a page takes in memory, and without a pause."""


ROWS = 16
"""Events that are read at a time: some have a megabyte."""


LOOK_BACK_EVENTS = 200
"""Events before a page of a node's pay, among which are the verdicts behind its first lines."""


class Pages:
    """The log of one run, page by page."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Semaphore(1)

    async def after(self, seq: int) -> StreamingResponse:
        """The stored bytes of the events after `seq`, a line each: these bytes are hashed."""
        async with self._turn:  # guard: one-page-at-a-time
            parts, size_bytes, digest = await self._measured(seq)
        headers = {"content-length": str(size_bytes), "content-digest": content_digest(digest)}
        return StreamingResponse(self._sent(seq, parts), headers=headers, media_type="application/x-ndjson")

    async def entries(self, seq: int) -> list[Entry]:
        """About a page of events after `seq`, and some before."""
        found, size_bytes, first = list[Entry](), 0, max(-1, seq - LOOK_BACK_EVENTS)
        async with self._turn:  # guard: one-page-of-pay-at-a-time
            with closing(self._store.read(first, seq - first + MAX_EVENTS, ROWS)) as rows:
                for data, _ in rows:
                    found.append(read_entry(data)[0])
                    size_bytes += len(data)
                    if len(found) % ROWS == 0:
                        await asyncio.sleep(0)  # guard: pages-of-pay-give-way
                    if size_bytes > MAX_EVENTS_BYTES and found[-1].seq > seq:  # guard: page-of-pay
                        break
        return found

    async def _measured(self, seq: int) -> tuple[list[int], int, str]:
        """Numbers of events in the parts of a page, and the page's size and digest."""
        parts, events, part_bytes, size_bytes, hashed = list[int](), 0, 0, 0, hashlib.sha256()
        with closing(self._store.read(seq, MAX_EVENTS, ROWS)) as rows:
            for data, _ in rows:
                hashed.update(data + b"\n")
                events, part_bytes, size_bytes = events + 1, part_bytes + len(data) + 1, size_bytes + len(data) + 1
                if part_bytes >= PART_BYTES:
                    parts.append(events)
                    events = part_bytes = 0
                    await asyncio.sleep(0)  # others come first  # guard: pages-give-way
                if size_bytes > MAX_EVENTS_BYTES:  # guard: page-of-the-log
                    break
        return [*parts, events] if events else parts, size_bytes, hashed.hexdigest()

    async def _sent(self, seq: int, parts: Sequence[int]) -> AsyncIterator[bytes]:
        """The parts, each read when the one before it has gone out."""
        for events in parts:
            yield b"".join(data + b"\n" for data, _ in self._store.read(seq, events))
            seq += events


# --- long polls ---
#
# A wait costs a connection that is not closed to make room for others. A caller without a place is answered at once.


MOST_WAITS, MOST_OF_A_CROWD = 512, 32
"""Callers that wait at one time: an eighth of all connections, and room for all relays that can be listed."""


class LongPollLimits:
    """The callers that wait."""

    def __init__(self, most: int = MOST_WAITS, of_a_crowd: int = MOST_OF_A_CROWD) -> None:
        self._most, self._of_a_crowd = most, of_a_crowd
        self._of: Counter[str] = Counter()
        self._of_publishers: Counter[str] = Counter()

    @contextmanager
    def place(self, host: str, publisher: str = "") -> Iterator[bool]:
        """Whether a caller from an address may wait; it has its place until the context ends. `publisher` is the key of
        the run's that signed the request: each has its own places, whatever strangers hold."""
        crowd = publisher or crowd_of(host)
        held = self._of_publishers if publisher else self._of  # guard: publishers-wait-apart
        if held.total() >= self._most or held[crowd] >= self._of_a_crowd:  # guard: few-wait
            yield False
            return
        held[crowd] += 1
        try:
            yield True
        finally:
            held.subtract((crowd,))
            held += Counter()  # forgets a network of which nobody waits


# --- the context ---


log = logging.getLogger("coordinator")


@dataclass(frozen=True)
class RequestContext:
    coordinator: Coordinator
    status_cache: StatusCache
    gate: Gate
    line: LeaseQueue
    asked: LeasePollReplays
    pages: Pages
    waits: LongPollLimits
    exposed: PrometheusCollector

    def admit(self, request: Request, cap: int = SMALL_BODY_BYTES) -> Caller:
        """Who signed the request, before its body is read. Raises `Refused` if our log lacks the head that the caller saw
        last, or the manifest of the version that it has: then the log was forked or rolled back, or a manifest forged."""
        caller = self.gate.admit(request, run=self.coordinator.state.run, cap=cap)
        if caller.head and not self.coordinator.log_writer.knows(caller.head):
            self._say_fork(caller.key)
            raise Refused("fork", f"your last log head {caller.head[:16]} is not in this log: the host's log was rolled "
                          "back or forked. Keep your receipts and tell the host")  # fmt: skip
        if caller.manifest and not self.coordinator.log_writer.knows_manifest(
            caller.manifest
        ):  # guard: manifest-in-the-log
            raise Refused("fork", f"your manifest {caller.manifest[:16]} is not in this log, though the trainer key signed "
                          "it. Keep your evidence folder and tell the host")  # fmt: skip
        if caller.key in self.coordinator.state.members:  # guard: strangers-fill-no-table
            self.coordinator.heard[caller.key] = self.coordinator.clock()
        return caller

    def _say_fork(self, key: str) -> None:
        """Tell the host, once for each member: nobody else can see that an old copy of the log was put back."""
        member = self.coordinator.state.members.get(key)
        if member is not None and key not in self.coordinator.forked:  # guard: forks-are-told-once
            self.coordinator.forked.add(key)
            log.error("%s (%s) %s", member.name, key[:12], SAYS_FORK)

    async def caller(self, request: Request) -> tuple[Caller, bytes]:
        """Who signed the request, and its body. The body must be small, because anyone with a key may send one."""
        caller = self.admit(request)
        return caller, await self.gate.body(request, caller)


Handler: TypeAlias = Callable[[RequestContext, Request], Awaitable[Response]]


def number(text: str, what: str) -> int:
    """A whole number of a path or query. Raises `RequestRefused`."""
    if not text.removeprefix("-").isdecimal() or len(text) > 12:
        raise server.RequestRefused(400, "malformed", f"{what} must be a whole number")
    return int(text)

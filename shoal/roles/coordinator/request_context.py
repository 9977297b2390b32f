"""The context of a request: the coordinator's parts, the caller, and the limits of requests that wait."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from shoal.ledger.errors import Refused
from shoal.ledger.hints import SAYS_FORK
from shoal.net import server
from shoal.net.server import Gate
from shoal.protocol.constants import SMALL_BODY_BYTES
from shoal.protocol.signing import Caller
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.lease_queue import LeasePollReplays, LeaseQueue
from shoal.roles.coordinator.log_pages import Pages
from shoal.roles.coordinator.prometheus import PrometheusCollector
from shoal.roles.coordinator.relay_challenges import crowd_of
from shoal.roles.coordinator.status import StatusBoard

# --- Places for those who wait for news ---
#
# A few for each network, and not many in all; the run's publishers have their own.
#
# A wait costs a connection that is not closed to make room for others, so a flood of waits would keep them out. A caller
# without a place is answered at once, and asks again later.


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


# --- What the handlers of calls work with ---
#
# The desk and those beside it, and who is calling.
#
# It admits a caller before the body is read, and decides nothing about what is asked.


log = logging.getLogger("coordinator")


@dataclass(frozen=True)
class RequestContext:
    desk: Coordinator
    board: StatusBoard
    gate: Gate
    line: LeaseQueue
    asked: LeasePollReplays
    pages: Pages
    waits: LongPollLimits
    exposed: PrometheusCollector

    def admit(self, request: Request, cap: int = SMALL_BODY_BYTES) -> Caller:
        """Who signed the request, before its body is read. Raises `Refused` if our log lacks the head that the caller saw
        last, or the manifest of the version that it has: then the log was forked or rolled back, or a manifest forged."""
        caller = self.gate.admit(request, run=self.desk.state.run, cap=cap)
        if caller.head and not self.desk.book.knows(caller.head):
            self._say_fork(caller.key)
            raise Refused("fork", f"your last log head {caller.head[:16]} is not in this log: the host's log was rolled "
                          "back or forked. Keep your receipts and tell the host")  # fmt: skip
        if caller.manifest and not self.desk.book.knows_manifest(caller.manifest):  # guard: manifest-in-the-log
            raise Refused("fork", f"your manifest {caller.manifest[:16]} is not in this log, though the trainer key signed "
                          "it. Keep your evidence folder and tell the host")  # fmt: skip
        if caller.key in self.desk.state.members:  # guard: strangers-fill-no-table
            self.desk.heard[caller.key] = self.desk.clock()
        return caller

    def _say_fork(self, key: str) -> None:
        """Tell the host, once for each member: nobody else can see that an old copy of the log was put back."""
        member = self.desk.state.members.get(key)
        if member is not None and key not in self.desk.forked:  # guard: forks-are-told-once
            self.desk.forked.add(key)
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

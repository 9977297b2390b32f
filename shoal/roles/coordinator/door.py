"""What the handlers of calls work with: the desk and those beside it, and who is calling.

Used by `api` and `shown`. It admits a caller before the body is read, and decides nothing about what is asked.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from shoal.ledger.answers import Refused
from shoal.ledger.hints import SAYS_FORK
from shoal.net import server
from shoal.net.server import Gate
from shoal.protocol.constants import SMALL_BODY_BYTES
from shoal.protocol.identity import Caller
from shoal.roles.coordinator.asked import Asked
from shoal.roles.coordinator.board import Board
from shoal.roles.coordinator.desk import Desk
from shoal.roles.coordinator.exposed import Exposed
from shoal.roles.coordinator.line import Line
from shoal.roles.coordinator.pages import Pages
from shoal.roles.coordinator.waits import Waits

log = logging.getLogger("coordinator")


@dataclass(frozen=True)
class Door:
    desk: Desk
    board: Board
    gate: Gate
    line: Line
    asked: Asked
    pages: Pages
    waits: Waits
    exposed: Exposed

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


Handler: TypeAlias = Callable[[Door, Request], Awaitable[Response]]


def number(text: str, what: str) -> int:
    """A whole number of a path or query. Raises `RequestRefused`."""
    if not text.removeprefix("-").isdecimal() or len(text) > 12:
        raise server.RequestRefused(400, "malformed", f"{what} must be a whole number")
    return int(text)

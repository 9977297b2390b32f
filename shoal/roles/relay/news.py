"""What the coordinator says of the run, asked so that a relay hears of a version when it is published.

Called by `fill`. The coordinator holds each question until there is a newer version. One that does not hold it, because it
is older, has no place, or is hostile, is asked every `ASK_EVERY_S`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from shoal.errors import PeerError, ShoalError
from shoal.net.client import Client
from shoal.protocol.types import RunInfo

log = logging.getLogger("relay")

ASK_EVERY_S = 2.0
"""Least time from the beginning of one question to that of the next."""

REST_S = 10.0
"""After a question that failed."""


class News:
    """The run as the coordinator told it last."""

    def __init__(
        self,
        client: Client,
        info: RunInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.info = info
        self._client, self._clock, self._sleep = client, clock, sleep
        self._bell = asyncio.Event()

    async def follow(self) -> None:
        """Ask until cancelled. What goes wrong is told, and asked again."""
        while True:
            began = self._clock()
            try:
                self._take(await self._client.get_json(f"/v1/run?after={self.info.version}", RunInfo))
            except ShoalError as error:
                log.warning("%s", error)
                await self._sleep(REST_S)
            await self._sleep(max(0.0, began + ASK_EVERY_S - self._clock()))  # guard: questions-apart

    def _take(self, told: RunInfo) -> None:
        if told.run != self.info.run:  # guard: relays-one-run
            raise PeerError("the host serves another run now: start the relay again to serve that one")
        self.info = told
        self._bell.set()

    async def wait(self, seen: int | None, limit_s: float) -> None:
        """Return as soon as the newest version is another than the one seen (None: none), or after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.info.version == seen:
                    self._bell.clear()
                    await self._bell.wait()

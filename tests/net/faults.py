"""A lying network for tests, driven by a seed: all that can happen to a request between two honest programs.

Wraps the transport of a `Client` (in memory or real). Each request draws one fault or none from a generator that the
test seeds, so every failure can be replayed. The faults are implemented here, not by patching the client.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from enum import Enum

import httpx


class Fault(Enum):
    """What the network can do to one request."""

    DROP_REQUEST = "the request never arrives"
    DROP_RESPONSE = "the request is applied, its answer never arrives"
    DUPLICATE = "the request arrives twice; the second answer comes back"
    DELAY = "the answer comes late"
    CORRUPT_REQUEST = "one bit of the request's body is flipped"
    CORRUPT_RESPONSE = "one bit of the answer's body is flipped"
    TRUNCATE_RESPONSE = "the answer's body ends early"
    SERVER_ERROR = "something on the way answers 502"
    RESET = "the connection breaks while the answer is read, after the request was applied"


class FaultyTransport(httpx.AsyncBaseTransport):
    """A transport that applies faults to a share of its requests."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]],
        *,
        faults: Collection[Fault] = tuple(Fault),
        rate: float = 0.5,
        delay_s: float = 1.0,
    ) -> None:
        """`rate` is the share of requests that get one of `faults`; `DELAY` calls `sleep(delay_s)`."""
        self._inner, self._rng, self._sleep = inner, rng, sleep
        self._faults, self._rate, self._delay_s = list(faults), rate, delay_s
        self.seen: Counter[Fault | None] = Counter()
        """How often each fault happened; None counts requests without a fault."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on, or apply the fault that was drawn."""
        fault = self._rng.choice(self._faults) if self._rng.random() < self._rate else None
        self.seen[fault] += 1
        body = await request.aread()
        match fault:
            case Fault.DROP_REQUEST:
                raise httpx.ConnectTimeout("the request was dropped", request=request)
            case Fault.SERVER_ERROR:
                return httpx.Response(502, stream=httpx.ByteStream(b"<html>Bad Gateway</html>"), request=request)
            case Fault.DELAY:
                await self._sleep(self._delay_s)
            case Fault.DUPLICATE:
                await self._pass_on(request, body)
            case Fault.CORRUPT_REQUEST:
                body = self._flip(body)
        response, content = await self._pass_on(request, body)
        match fault:
            case Fault.DROP_RESPONSE:
                raise httpx.ReadTimeout("the answer was dropped", request=request)
            case Fault.RESET:
                raise httpx.ReadError("connection reset by peer", request=request)
            case Fault.CORRUPT_RESPONSE:
                content = self._flip(content)
            case Fault.TRUNCATE_RESPONSE:
                content = content[: len(content) // 2]
        return httpx.Response(
            response.status_code, headers=response.headers, stream=httpx.ByteStream(content), request=request
        )

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._inner.aclose()

    async def _pass_on(self, request: httpx.Request, body: bytes) -> tuple[httpx.Response, bytes]:
        """The answer to the request in its present form, with its body read."""
        sent = httpx.Request(
            request.method, request.url, headers=request.headers, content=body, extensions=request.extensions
        )
        response = await self._inner.handle_async_request(sent)
        try:
            content = b"".join([part async for part in response.stream])  # type: ignore[union-attr]
        finally:
            await response.aclose()
        return response, content

    def _flip(self, body: bytes) -> bytes:
        if not body:
            return body
        flipped = bytearray(body)
        flipped[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)
        return bytes(flipped)

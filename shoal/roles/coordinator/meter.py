"""What the coordinator's requests cost, and how late its event loop is: counted while it happens.

`api` puts a `Metered` before the handler of each call, `role` reports the lag, and `exposed` shows the counts. It reads no
header but the declared length of a body. Calls are those of the table in `api`, so strangers cannot add series.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.roles.coordinator.watched import LAG_SECONDS, PREFIX, REQUEST_BYTES, REQUEST_SECONDS, WATCHED

MAX_LENGTH_DIGITS = 12
"""Of a declared length; a longer one is refused before anything is read, and counts as 0."""


class Meter:
    """The counts of one coordinator, in a registry of its own: tests have several in one process."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.registry = CollectorRegistry(auto_describe=False)
        disable_created_metrics()  # a series more for each that there is, and nobody asks when it began
        self._requests = Counter(PREFIX + "requests", *_declared("requests_total"), registry=self.registry)
        self._seconds = self._histogram("request_seconds", REQUEST_SECONDS)
        self._in, self._out = (self._histogram(name, REQUEST_BYTES) for name in ("request_bytes", "answer_bytes"))
        self._lag = self._histogram("event_loop_lag_seconds", LAG_SECONDS)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, *_declared(name), unit=WATCHED[name].unit, buckets=buckets, registry=self.registry
        )

    def answered(self, call: str, status: int, took_s: float, in_bytes: int, out_bytes: int) -> None:
        """Count a request."""
        self._requests.labels(call, f"{status // 100}xx").inc()
        self._seconds.labels(call).observe(took_s)
        if in_bytes:
            self._in.labels(call).observe(in_bytes)
        self._out.labels(call).observe(out_bytes)

    def late(self, lag_s: float) -> None:
        """Note how much later than it was due the event loop did something."""
        self._lag.observe(max(0.0, lag_s))


def _declared(name: str) -> tuple[str, tuple[str, ...]]:
    return WATCHED[name].sentence, WATCHED[name].labels


class Metered:
    """The handler of one call, with its requests counted."""

    def __init__(self, app: ASGIApp, meter: Meter, call: str) -> None:
        self._app, self._meter, self._call = app, meter, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, sent_bytes = self._meter.clock(), 0
        status = 500  # what `net/server` answers if the handler fails

        async def send_counted(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            took_s = self._meter.clock() - began
            self._meter.answered(self._call, status, took_s, _declared_bytes(scope), sent_bytes)


def _declared_bytes(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(length) if length.isdigit() and len(length) <= MAX_LENGTH_DIGITS else 0

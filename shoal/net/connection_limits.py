"""Limits on a server's connections: how many it holds, and how long each may take, before any request is read.

They get a uvicorn server from `http_server`. Each connection is a `Connection`, which adds limits to uvicorn's own class;
`Connections` counts them by address. This file reads no body and no signature: the `Gate` does.
"""

import asyncio
import ipaddress
import logging
import resource
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.net.server import PROTOCOL_HEADER, RequestRefused, network_of, refusal
from shoal.protocol import constants

log = logging.getLogger(__name__)

RESERVED_FILES = 64
"""File descriptors kept free for the log, blobs and everything else."""

FILES_A_CONNECTION = 2
"""Its socket, and the file that it sends or receives."""

TELL_EVERY_S = 60.0
"""Time between log lines about refused or closed connections."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. The defaults are the protocol's; tests use smaller ones."""

    total: int = constants.MAX_CONNECTIONS
    """Open connections in total."""
    per_address: int = constants.MAX_ADDRESS_CONNECTIONS
    """Open connections of one address, unless it is trusted."""
    trusted: tuple[str, ...] = ()
    """Addresses or networks of trusted proxies."""
    header_bytes: int = constants.MAX_HEADER_BYTES
    """Size of a request's first line and headers."""
    header_s: float = constants.HEADER_TIMEOUT_S
    """Seconds for a request's headers, from connecting, or from the first byte of a later request."""
    idle_s: float = constants.IDLE_TIMEOUT_S
    """Seconds between two requests."""
    rest_s: float = constants.REST_TIMEOUT_S
    """Seconds for the rest of a refused body."""
    stall_s: float = constants.STALL_TIMEOUT_S
    """A client must take part of its answer within this many seconds."""


def http_server(app: ASGIApp, limits: ServerLimits) -> uvicorn.Server:
    """A server for an application, with these limits. It believes `X-Forwarded-For` only from trusted addresses."""
    config = uvicorn.Config(
        app,
        http=Connections(limits).protocol,  # type: ignore[arg-type]  # uvicorn calls it with keywords, like a class
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        forwarded_allow_ips=list(limits.trusted),
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_stop)
    return uvicorn.Server(config)


def _is_no_stop(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn is not about polls that were open at a stop: those are told to ask again."""
    return "timeout graceful shutdown exceeded" not in record.getMessage()


def connections_that_fit(wanted: int = constants.MAX_CONNECTIONS) -> int:
    """Raise this process's limit of open files to fit `wanted` connections, if possible; returns how many fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * FILES_A_CONNECTION + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # macOS reports a higher limit than it allows
        allowed = soft
    fit = min(wanted, max(1, (allowed - RESERVED_FILES) // FILES_A_CONNECTION))
    if fit < wanted:
        log.warning("connections=%d wanted=%d reason='ulimit -Hn allows %d open files'", fit, wanted, allowed)
    return fit


class Connections:
    """The open connections of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._trusted = [ipaddress.ip_network(name, strict=False) for name in limits.trusted]
        self._of: dict[str, set[Connection]] = {}
        self._idle: dict[Connection, None] = {}
        """Connections without a request in flight, the longest idle first."""
        self._num_open = self._num_closed = self._num_refused = self._num_idled = 0
        self._tell_at = 0.0

    def protocol(self, **options: Any) -> "Connection":
        """Make a new connection. uvicorn calls this for each one."""
        return Connection(self, **options)

    def enter(self, connection: "Connection") -> bool:
        """Count a new connection, closing the longest idle one if necessary. Returns False if there is no room."""
        host = connection.client[0] if connection.client else ""
        connection.address = network_of(host)
        neighbours = self._of.get(connection.address, set())
        # guard: proxies-have-no-share
        crowded = len(neighbours) >= self.limits.per_address and not self._is_trusted(host)
        # guard: share-of-an-address
        if crowded and not self._close_longest_idle([one for one in neighbours if one in self._idle]):
            return self._refuse(connection)
        if self._num_open >= self.limits.total and not self._close_longest_idle(self._idle):  # guard: connection-limit
            return self._refuse(connection)
        self._of.setdefault(connection.address, set()).add(connection)
        self._num_open += 1
        self.idle(connection)
        return True

    def leave(self, connection: "Connection") -> None:
        """Forget a connection. A second call changes nothing."""
        neighbours = self._of.get(connection.address, set())
        if connection in neighbours:
            neighbours.remove(connection)
            self._num_open -= 1
            if not neighbours:
                del self._of[connection.address]
        self._idle.pop(connection, None)

    def work(self, connection: "Connection") -> None:
        """Note that a request has begun: the connection is not closed to make room for another."""
        self._idle.pop(connection, None)  # guard: busy-is-not-idle

    def idle(self, connection: "Connection") -> None:
        """Note that the connection has no request in flight."""
        self._num_idled += 1
        connection.idle_since = self._num_idled
        self._idle[connection] = None

    def _is_trusted(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._trusted)

    def _close_longest_idle(self, among: "dict[Connection, None] | list[Connection]") -> bool:
        longest = (
            min(among, key=lambda one: one.idle_since, default=None)
            if isinstance(among, list)
            else next(iter(among), None)
        )
        if longest is None:
            return False
        self.leave(longest)
        longest.transport.abort()
        self._num_closed += 1
        self._tell(longest)
        return True

    def _refuse(self, connection: "Connection") -> bool:
        self._num_refused += 1
        self._tell(connection)
        return False

    def _tell(self, connection: "Connection") -> None:
        now = connection.loop.time()
        if now < self._tell_at:
            return
        log.warning(
            "connections=%d limit=%d limit_an_address=%d closed_idle=%d refused=%d latest=%s", self._num_open,
            self.limits.total, self.limits.per_address, self._num_closed, self._num_refused, connection.address,
        )  # fmt: skip
        self._tell_at = now + TELL_EVERY_S
        self._num_closed = self._num_refused = 0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn says what nobody else has said. An application says itself why it cuts off an answer, and
    a server that stops cancels those that go on."""
    cancelled = record.exc_info and record.exc_info[0] is asyncio.CancelledError
    return not cancelled and record.msg != "ASGI callable returned without completing response."


_quiet = logging.getLogger(f"{__name__}.http")
"""Replaces uvicorn's logger, which writes a line for each malformed request and so lets strangers fill a disk."""
_quiet.addFilter(_is_news)


class Connection(HttpToolsProtocol):
    """A connection that must send its headers in time, take its answers, and send one request at a time."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        _quiet.setLevel(logging.ERROR)
        self.logger = _quiet
        self._all, self._limits = connections, connections.limits
        self.timeout_keep_alive = self._limits.idle_s  # type: ignore[assignment]
        self.address = ""
        self.idle_since = 0
        """A growing number, because a clock cannot order connections that come at the same moment."""
        self._fault: RequestRefused | None = None
        """Why the received bytes were refused."""
        self._header_bytes = 0
        """Bytes received of the request whose headers have not ended."""
        self._parsed_bytes = 0
        """Bytes parsed of the same request."""
        self._in_body = False
        self._discarded_bytes = 0
        self._watched = ""
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # --- events of the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._all.enter(self):
            self._watch()
        else:
            full = "this server holds as many connections as it can, or as one address may: come back later"
            self._answer(RequestRefused(503, "too_many_connections", full, retry_s=5.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        self._set_timer("", 0.0)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_rest = self._in_body and not self.busy
        super().data_received(data)
        if was_rest:
            self._discard(len(data))
        elif not self._in_body and not self.busy:
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.header_bytes:  # guard: header-size
                self._answer(self._too_long())
        self._watch()

    def _discard(self, num_bytes: int) -> None:
        """Read and drop the rest of a refused body: if we closed now, the sender could not read the refusal."""
        self._discarded_bytes += num_bytes
        if self._discarded_bytes > constants.MAX_DISCARDED_BYTES:  # guard: rest-size
            self.transport.close()
        elif not self._in_body and not self.busy:  # uvicorn cancels its own timer at the first byte
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(self._limits.idle_s, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    # --- events of its bytes ---

    @property
    def busy(self) -> bool:
        """Whether a request is in flight: its headers are complete and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        if self.busy:  # guard: one-request-at-a-time
            raise self._refused(
                RequestRefused(400, "malformed", "a request came before the answer to the last: wait for it")
            )
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parse(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parse(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._header_bytes = self._parsed_bytes = self._discarded_bytes = 0
        self._in_body = True
        self._all.work(self)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.cycle.body = bytearray()  # drop a body that nobody read
        self._all.idle(self)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are not HTTP, and for requests that the callbacks above refuse."""
        self._answer(self._fault or RequestRefused(400, "malformed", "this is not HTTP/1.1: check the client"))

    def _parse(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self._limits.header_bytes:  # guard: parsed-header-size
            raise self._refused(self._too_long())

    def _too_long(self) -> RequestRefused:
        most = self._limits.header_bytes
        return RequestRefused(
            431, "too_large", f"the headers have more than {most} bytes (MAX_HEADER_BYTES): send less"
        )

    def _refused(self, fault: RequestRefused) -> RequestRefused:
        self._fault = fault
        return fault

    def _answer(self, refused: RequestRefused) -> None:
        """Close with a reason, or without one if it would land in the middle of another answer."""
        if not self.busy and not self.transport.is_closing():
            self.transport.write(_bytes_of(refused))
        self.transport.close()
        self._watch()

    # --- time ---

    def _watch(self) -> None:
        """Set the timer that is due now. A timer already running for the same reason continues."""
        if self.transport.is_closing():
            self._set_timer("", 0.0)
            self._watch_writing()
        elif self.busy:
            self._set_timer("", 0.0)
        elif self._in_body:
            self._set_timer("rest", self._limits.rest_s)  # guard: rest-time
        elif self._header_bytes or self.cycle is None:  # guard: header-time
            self._set_timer("header", self._limits.header_s)
        else:
            self._set_timer("", 0.0)  # between two requests uvicorn's own timer runs

    def _set_timer(self, reason: str, after_s: float) -> None:
        if reason == self._watched:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._watched = reason
        self._timer = self.loop.call_later(after_s, self._time_is_up) if reason else None

    def _time_is_up(self) -> None:
        if self._watched == "rest":
            self.transport.close()
            self._watch()
            return
        slow = f"the headers took longer than {self._limits.header_s:.0f} s (HEADER_TIMEOUT_S): send faster"
        self._answer(RequestRefused(408, "too_slow", slow))

    def _watch_writing(self) -> None:
        """Abort if a client takes nothing of its answer: it would hold the connection and the file for ever."""
        if self._stall is None:
            unsent = self.transport.get_write_buffer_size()
            self._stall = self.loop.call_later(self._limits.stall_s, self._check_writing, unsent)

    def _check_writing(self, before: int) -> None:
        self._stall = None
        if self.transport.get_write_buffer_size() >= before:  # guard: answer-is-taken
            self.transport.abort()
        else:
            self._watch_writing()


def _bytes_of(refused: RequestRefused) -> bytes:
    response = refusal(refused)
    response.headers["connection"] = "close"
    response.headers[PROTOCOL_HEADER] = str(constants.PROTOCOL_VERSION)
    first = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\n".encode()
    headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return first + headers + b"\r\n" + bytes(response.body)

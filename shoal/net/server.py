"""The serving side of HTTP, for the coordinator: what a request passes before a role sees it.

A `Gate` checks in this order: rate of the address, declared size, signature, rate of the key, then whatever the role asks
of the sender; only then does it read the body, within limits of time. `application` turns every error of the `ShoalError`
and wire families into a `Refusal` with the right status.
"""

import asyncio
import hashlib
import ipaddress
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.errors import NothingYet, PeerError, ShoalError, StateError, Superseded
from shoal.protocol import constants, encoding
from shoal.protocol.messages import Refusal
from shoal.protocol.signing import Caller, RequestLine, SignatureError, content_digest, verify_headers

T = TypeVar("T")

PROTOCOL_HEADER = "shoal-protocol"
"""On every answer of ours: tells a client that it has reached a shoal node and not another server."""

STOPPING = "this server stops now: ask again when it has been started again"

log = logging.getLogger(__name__)


class RequestRefused(Exception):
    """Raised anywhere in a request to answer with a status and a reason. The fault is the peer's, not ours."""

    def __init__(self, status: int, code: str, error: str, retry_s: float | None = None) -> None:
        super().__init__(error)
        self.status, self.code, self.error, self.retry_s = status, code, error, retry_s


class Gate:
    """The first checks of every request. A server has one gate, which counts bodies and rates by address and key."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        body_window: tuple[float, int] = (constants.BODY_WINDOW_S, constants.BODY_WINDOW_BYTES),
        bodies_bytes: int = constants.MAX_BODIES_BYTES,
        address_rate: tuple[float, int] = (constants.ADDRESS_REQUESTS_PER_S, constants.ADDRESS_BURST),
        key_rate: tuple[float, int] = (constants.KEY_REQUESTS_PER_S, constants.KEY_BURST),
        newcomer_rate: tuple[float, int] = (constants.ADDRESS_NEWCOMERS_PER_S, constants.ADDRESS_NEWCOMERS_BURST),
    ) -> None:
        """`clock` gives seconds since the epoch; rates are (requests per second, burst).

        `body_window` is (seconds, bytes): in each window a body must bring that many bytes, or end. `bodies_bytes`
        limits the total of all bodies that are being read into memory; small bodies do not count.
        """
        self._clock = clock
        self._body_window = body_window
        self._bodies_left = bodies_bytes
        self._addresses = Buckets(*address_rate)
        self._keys = Buckets(*key_rate)
        self._newcomers = Buckets(*newcomer_rate)

    async def anyone(self, request: Request) -> None:
        """Admit a request that needs no signature and has no body. Raises `RequestRefused` 411, 413, 429."""
        self._limit(self._addresses, address_of(request), "address")
        if body_bytes(request) > 0:  # guard: body-not-wanted
            raise _too_large(0)

    def admit(self, request: Request, *, run: str, cap: int = constants.SMALL_BODY_BYTES) -> Caller:
        """The verified sender of a request, which must be for `run`. Does not read the body.

        Raises `RequestRefused` 411, 413 (body), 401 (signature, clock), 409 (another run), 429 (rate).
        """
        self._limit(self._addresses, address_of(request), "address")
        if body_bytes(request) > cap:  # guard: body-size
            raise _too_large(cap)
        try:
            caller = verify_headers(request_line(request), _signed_headers(request), now=self._clock())
        except SignatureError as error:
            raise RequestRefused(401, error.code, str(error)) from None
        self._limit(self._keys, caller.key, "key")
        if caller.run != run:
            raise RequestRefused(
                409,
                "wrong_run",
                f"the request is for run {caller.run or '(none)'}, this is run {run}: read GET /v1/run again and "
                "send its run id in shoal-run",
            )
        return caller

    def newcomer(self, request: Request) -> None:
        """Admit a key that the role would have to remember. Keys are free, so it counts for its address. Raises
        `RequestRefused` 429."""
        self._limit(self._newcomers, address_of(request), "address by new keys")

    async def body(self, request: Request, caller: Caller) -> bytes:
        """The body of an admitted request, in memory. Raises `RequestRefused` 400, 408, 503 (too many large bodies)."""
        size, body = body_bytes(request), bytearray()
        counted = size if size > constants.SMALL_BODY_BYTES else 0
        if counted > self._bodies_left:  # guard: budget-of-bodies
            raise RequestRefused(503, "busy", "too many large bodies are arriving: send again in a moment", retry_s=1.0)
        self._bodies_left -= counted
        try:
            await self.pour(request, caller, body.extend)
        finally:
            self._bodies_left += counted
        return bytes(body)

    async def pour(self, request: Request, caller: Caller, take: Callable[[bytes], object]) -> None:
        """Pass the body of an admitted request to `take`, part by part. The caller must have checked its size.

        Raises `RequestRefused` 400 if the length or the digest differs from the signed headers, and 408 if the body comes
        too slowly. The digest is known only at the end: after an error, throw away what was taken.
        """
        hashed = hashlib.sha256()

        def hash_and_take(part: bytes) -> None:
            hashed.update(part)
            take(part)

        await read_body(request, hash_and_take, window=self._body_window)
        if hashed.hexdigest() != caller.digest:  # guard: body-digest
            raise RequestRefused(
                400, "digest", "the body does not match its content-digest: it was damaged on the way; send again"
            )

    def _limit(self, buckets: "Buckets", name: str, what: str) -> None:
        wait_s = buckets.take(name, self._clock())
        if wait_s > 0:
            raise RequestRefused(
                429,
                "too_many_requests",
                f"more than {buckets.per_s:g} requests per second from one {what}: come back in {wait_s:.1f} s",
                retry_s=wait_s,
            )


def body_bytes(request: Request) -> int:
    """The declared length of a request's body; 0 without a body. Raises `RequestRefused` 411 if the length is missing."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20:
        return int(declared)
    # guard: body-length-is-declared
    if declared or "transfer-encoding" in request.headers or request.method in ("POST", "PUT", "PATCH"):
        raise RequestRefused(
            411, "length_required", "the body's length is not known: send content-length, and no chunks"
        )
    return 0


async def read_body(request: Request, take: Callable[[bytes], object], *, window: tuple[float, int]) -> None:
    """Pass each part of a body to `take`. Raises `RequestRefused` if it is slower than `window`, or has another length."""
    window_s, window_bytes = window
    length, taken, due = body_bytes(request), 0, window_bytes
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(window_s) as limit:
            async for part in request.stream():
                taken += len(part)
                if taken > length:
                    raise RequestRefused(
                        400, "malformed", f"the body has more than the {length} bytes that it declares"
                    )
                take(part)
                if taken >= due:
                    due = taken + window_bytes
                    limit.reschedule(loop.time() + window_s)  # guard: stalled-body-ends, slow-body-passes
    except TimeoutError:
        raise RequestRefused(
            408,
            "too_slow",
            f"less than {window_bytes} bytes of the body came in {window_s:.0f} s (BODY_WINDOW_BYTES, BODY_WINDOW_S): "
            "send faster",
        ) from None
    except ClientDisconnect:
        taken = -1
    if taken != length:
        raise RequestRefused(400, "truncated", "the connection ended before the body did: send again")


def _too_large(cap: int) -> RequestRefused:
    return RequestRefused(
        413, "too_large", f"the body is larger than the {cap} bytes allowed here: send less at a time"
    )


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body as exactly `kind`. Raises `WireError`; `application` answers that with 400."""
    return encoding.from_json(body, kind)


def request_line(request: Request) -> RequestLine:
    """Method, path and query exactly as sent."""
    path = request.scope.get("raw_path") or request.scope["path"].encode()
    return RequestLine(
        request.method, path.split(b"?")[0].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    )


def address_of(request: Request) -> str:
    """The network address for rate limits; for IPv6 the /64, because one home or machine has all of it."""
    return network_of(host_of(request))


def host_of(request: Request) -> str:
    """The network address that a request came from, as far as is known; "" in tests without a network."""
    return request.client.host if request.client else ""


def came_from(request: Request) -> tuple[str, bool]:
    """The address that a request came from, and whether a proxy that is not trusted may have passed it on: then it may be
    the proxy's."""
    believed = request.client is not None and request.client.port == 0  # as a trusted proxy said, without a port
    proxied = any(name in request.headers for name in ("x-forwarded-for", "forwarded", "via")) and not believed
    return host_of(request), proxied


def network_of(host: str) -> str:
    """The form of an address that is counted for limits."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return host


def _signed_headers(request: Request) -> dict[str, str]:
    """Headers by lower-case name. A header that the signature covers may occur only once: readers could differ."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        if name in headers and (name.startswith("shoal-") or name in _ONCE):
            raise RequestRefused(400, "malformed", f"the header {name} occurs twice: send it once")
        headers[name] = value
    return headers


_ONCE = frozenset({"content-digest", "signature", "signature-input"})


class Buckets:
    """Token buckets by name. The caller passes the time. A clock that jumps back changes no level."""

    def __init__(self, per_s: float, burst: int) -> None:
        self.per_s, self.burst = per_s, burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str, now: float) -> float:
        """Take one token. Returns 0.0, or the seconds until there is one."""
        level, then = self._levels.pop(name, (float(self.burst), now))
        level = min(self.burst, level + max(0.0, now - then) * self.per_s)
        wait_s = 0.0 if level >= 1 else (1 - level) / self.per_s
        self._levels[name] = (level - 1 if wait_s == 0 else level, now)
        if len(self._levels) > constants.MAX_BUCKETS:
            self._levels.popitem(last=False)
        return wait_s


# --- answers ---


def answer(value: object, status: int = 200) -> Response:
    """A JSON answer with its digest, so that a client notices damage."""
    return answer_bytes(encoding.to_json(value), "application/json", status)


def answer_bytes(body: bytes, media_type: str = "application/octet-stream", status: int = 200) -> Response:
    """An answer in bytes, with its digest."""
    return Response(body, status, {"content-digest": content_digest(encoding.digest(body))}, media_type)


def refusal(refused: RequestRefused) -> Response:
    """The answer for a `RequestRefused`."""
    response = answer(Refusal(error=refused.error, code=refused.code), refused.status)
    if refused.retry_s is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(refused.retry_s)))
    if refused.status == 408:
        response.headers["connection"] = "close"  # the rest of the body would be as slow
    return response


def refused_for(error: Exception) -> RequestRefused:
    """The status and code with which the peer is told of an error."""
    text = str(error)
    match error:
        case RequestRefused():
            return error
        case encoding.WireError():
            return RequestRefused(400, "malformed", text)
        case Superseded():
            return RequestRefused(410, "superseded", text)
        case NothingYet():
            return RequestRefused(404, "nothing_yet", text)
        case StateError():
            return RequestRefused(507, "storage", text, retry_s=5.0)
        case PeerError() | ShoalError():
            return RequestRefused(400, "malformed", text)
        case HTTPException():
            return RequestRefused(
                error.status_code, "no_such_call", f"{error.detail}: see GET /openapi.json for the calls"
            )
    return RequestRefused(500, "internal", "this server failed; its log has the details: try again later")


# --- the application ---


def application(routes: Sequence[BaseRoute], **options: Any) -> Starlette:
    """A Starlette application: every answer names its protocol, and every error is a `Refusal`.

    `options` are Starlette's (such as lifespan). Errors that are not the peer's fault are logged with a traceback.
    """
    handlers: dict[Any, Any] = dict.fromkeys(
        (RequestRefused, encoding.WireError, ShoalError, HTTPException), _tell_peer
    )
    app = Starlette(routes=list(routes), exception_handlers=handlers, **options)
    app.add_middleware(_Edge)
    return app


async def _tell_peer(request: Request, error: Exception) -> Response:
    refused = refused_for(error)
    # A refusal is the peer's doing, and anyone could fill the log with them.
    if refused.status >= 500 and not isinstance(error, RequestRefused):  # guard: refusals-fill-no-log
        log.error("refused=%s path=%s reason=%s", refused.code, request.url.path, refused.error)
    return refusal(refused)


class _Edge:
    """The outermost layer: marks each answer as ours, and answers 500 if a role fails, so that serving continues."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[PROTOCOL_HEADER] = str(constants.PROTOCOL_VERSION)
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except asyncio.CancelledError:  # the server stops, and a caller that waits would be told that it failed
            if not started:
                await refusal(RequestRefused(503, "stopping", STOPPING, retry_s=1.0))(scope, receive, send_marked)
            raise
        except Exception as error:
            log.exception("failed call=%s path=%s", scope["method"], scope["path"])
            if started:
                raise  # the answer is half sent, so the server must close the connection
            await refusal(refused_for(error))(scope, receive, send_marked)

"""A node's side of HTTP: signed calls, repeated until they are answered or a deadline passes.

One `Client` keeps connections to one server. All our calls are idempotent, so each may be repeated. A refusal becomes an
error of the `PeerError` family. The client waits out network trouble, and reports it while it lasts. Once the run has
answered, another program at its URL is such trouble, too.
"""

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, TypeVar

import httpx

from shoal.errors import NothingYet, PeerError, Superseded
from shoal.net.outbound_proxy import redacted
from shoal.net.retryable_errors import RetryableError, another_program, map_http_errors, retry_after
from shoal.net.safe_http import SHOAL, USER_AGENT, PinnedSideTransport, location_of, read_capped
from shoal.net.urls import server_url
from shoal.protocol import constants, encoding
from shoal.protocol.messages import Refusal, RunVersions
from shoal.protocol.signing import Key, RequestLine, SenderState, content_digest, sign_request

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
"""A connection that takes longer than this is given up."""

SILENCE_TIMEOUT_S = constants.LONG_POLL_S + 10.0
"""A server that sends nothing for this long counts as gone; it is longer than a server may hold a poll."""

PART_BYTES = 64 << 10
"""A larger body is sent in parts of this: it is each of them, not the whole, that must get through in SILENCE_TIMEOUT_S."""

SLOWEST_BYTES_PER_S = constants.BODY_WINDOW_BYTES / constants.BODY_WINDOW_S
"""An attempt may take longer by what its body takes at the slowest rate that a server accepts."""

SEND_BUFFER_BYTES = 1 << 20
"""Of a body, so much may wait in this machine's buffers when its last part has been handed over."""

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0
"""Pauses between attempts double from the first to the longest. Half of each is random, so that nodes spread out."""

MAX_REASON_CHARS = 1000
"""Of a server's reason for a refusal, so much is told."""

PATIENCE_S, FIRST_PATIENCE_S = 5.0, 3.0
"""Trouble that lasts longer than this is reported, and again each time that it has lasted twice as long. The shorter one is
for a server that has never answered: its URL may be wrong."""

OCTETS = "application/octet-stream"

NEVER_ANSWERED = "It has not answered before: check the URL, and that the host is up"

log = logging.getLogger(__name__)


def warn_of_wait(line: str) -> None:
    """The advice in a line about a wait, by default."""
    log.warning("%s. It asks again; Ctrl-C ends it", line)


class PeerRefused(PeerError):
    """The server refused the call. `status`, `code` and `reason` are as in its `Refusal`."""

    def __init__(self, call: str, status: int, code: str, reason: str) -> None:
        """`call` names who refused what."""
        super().__init__(f"{call} ({status} {code}): {reason}")
        self.status, self.code, self.reason = status, code, reason


class Timing(NamedTuple):
    """Clocks, pauses and the chance in their lengths."""

    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    monotonic: Callable[[], float] = time.monotonic
    rng: random.Random | None = None


class Client:
    """Calls to one server. Use as `async with Client(url, key) as client`, or call `close`."""

    def __init__(
        self,
        base_url: str,
        key: Key | None = None,
        *,
        run: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        timing: Timing | None = None,
        on_wait: Callable[[str], None] = warn_of_wait,
    ) -> None:
        """`run`, `head` and `manifest` are sent with each call that `key` signs; set these attributes once they are known.

        `transport` replaces the network, in tests. `on_wait` receives one line: what the client waits for, how long it
        has waited, and why. Raises `PeerError` for a bad URL.
        """
        self.base_url = server_url(base_url)
        self.transport = transport
        self.run = run
        self.head = ""
        self.manifest = ""
        self.key = key
        self._clock, self._sleep, self._monotonic, rng = timing or Timing()
        self._rng, self._on_wait = rng or random.Random(secrets.randbits(64)), on_wait
        self._reached = self._was_silent = False
        self.answered_at: float | None = None
        """When the server last answered anything, a refusal included, by the monotonic clock."""
        self._network = PinnedSideTransport(
            httpx.URL(self.base_url).host,
            verify=self.base_url.startswith("https:"),  # plain HTTP needs no certificates, and loading them is slow
            limits=httpx.Limits(max_connections=24, max_keepalive_connections=24, keepalive_expiry=60.0),
        )
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            transport=transport or self._network,
            trust_env=False,
            follow_redirects=False,
            headers={"accept-encoding": "identity", "user-agent": USER_AGENT},
        )

    def expect_run(self) -> None:
        """This node joined the run at this URL before: another program there is waited out from the first call on."""
        self._reached = True

    @property
    def may_be_inside(self) -> bool:
        """Whether the server was inside a network when it first answered, so that what it names may be inside, too."""
        return self.transport is not None or self._network.inside is True

    @property
    def goes_by_name(self) -> bool:
        """Whether a proxy looks up the server's name, which this machine cannot, and which TLS proves."""
        return self._network.inside is False and not self._network.address

    @property
    def address(self) -> str:
        """The address at which a server outside answered."""
        return "" if self.may_be_inside else self._network.address

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    # In every call, `path` starts with a slash and may have a query; `deadline_s` is how long to keep trying (None: for
    # ever); `timeout_s` limits one attempt; `cap` limits the answer, in bytes.

    async def get(
        self,
        path: str,
        *,
        cap: int = constants.MAX_JSON_BYTES,
        deadline_s: float | None = None,
        timeout_s: float = constants.REQUEST_TIMEOUT_S,
    ) -> bytes:
        """The bytes at a path. Raises `NothingYet` (404), `Superseded` (410), `PeerRefused` or `PeerError`."""
        return await self._call(_Call("GET", path, cap=cap, deadline_s=deadline_s, timeout_s=timeout_s))

    async def get_json(
        self,
        path: str,
        kind: type[T],
        *,
        cap: int = constants.MAX_JSON_BYTES,
        deadline_s: float | None = None,
        timeout_s: float = constants.REQUEST_TIMEOUT_S,
    ) -> T:
        """The JSON message at a path. Raises as `get`, and `PeerError` if the answer is not a `kind`."""
        return self._decode(await self.get(path, cap=cap, deadline_s=deadline_s, timeout_s=timeout_s), kind, path)

    async def demand_versions(self, rules_version: int) -> None:
        """Raise `PeerError` if the run is of another version of shoal. Asked before what another version may not decode."""
        run = await self.get_json("/v1/run", RunVersions)
        theirs, ours = (run.protocol, run.rules_version), (constants.PROTOCOL_VERSION, rules_version)
        if theirs != ours:  # guard: versions-of-the-run
            told = (
                f"version {protocol} of the protocol and {rules} of the rules" for protocol, rules in (theirs, ours)
            )
            raise PeerError(f"the run follows {next(told)}, this shoal {next(told)}: install the host's version")

    async def get_blob(self, digest: str, *, cap: int, deadline_s: float | None = None) -> bytes:
        """A blob by its SHA-256, verified. If the bytes are damaged on the way, they are fetched once more.

        Raises as `get`, and `PeerError`, which blames the server, if the bytes have the wrong hash twice.
        """
        for _ in range(2):
            blob = await self.get(f"/v1/blobs/{digest}", cap=cap, deadline_s=deadline_s)
            if encoding.digest(blob) == digest:
                return blob
        raise PeerError(f"{self.base_url} serves a wrong blob for {digest[:16]}…: fetch it from another source")

    async def post_json(
        self,
        path: str,
        value: object,
        kind: type[T],
        *,
        deadline_s: float | None = None,
        timeout_s: float = constants.REQUEST_TIMEOUT_S,
    ) -> T:
        """Send a JSON message and read the answer as `kind`. Raises as `get_json`."""
        return await self.send("POST", path, encoding.to_json(value), kind, deadline_s=deadline_s, timeout_s=timeout_s)

    async def put_bytes(self, path: str, body: bytes, kind: type[T], *, deadline_s: float | None = None) -> T:
        """Send a submission with PUT and read the answer as `kind`. Raises as `get_json`."""
        return await self.send("PUT", path, body, kind, media_type=OCTETS, deadline_s=deadline_s)

    async def put_blob(self, digest: str, body: bytes, kind: type[T], *, deadline_s: float | None = None) -> T:
        """Send bytes under `digest`, which must be their SHA-256, as the caller knows. Raises as `get_json`."""
        path = f"/v1/blobs/{digest}"
        call = _Call("PUT", path, body, OCTETS, deadline_s=deadline_s, digest=digest)
        return self._decode(await self._call(call), kind, path)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        kind: type[T],
        *,
        media_type: str = "application/json",
        deadline_s: float | None = None,
        timeout_s: float = constants.REQUEST_TIMEOUT_S,
    ) -> T:
        """Send a body unchanged and read the JSON answer as `kind`. Raises as `get_json`."""
        call = _Call(method, path, body, media_type, deadline_s=deadline_s, timeout_s=timeout_s)
        return self._decode(await self._call(call), kind, path)

    async def post_packed(
        self, path: str, value: object, kind: type[T], *, cap: int, deadline_s: float | None = None
    ) -> T:
        """Like `post_json`, with MessagePack both ways."""
        call = _Call("POST", path, encoding.to_msgpack(value), "application/msgpack", cap, deadline_s)
        return self._decode(await self._call(call), kind, path, encoding.from_msgpack)

    def _decode(
        self, body: bytes, kind: type[T], path: str, read: Callable[[bytes, type[T]], T] = encoding.from_json
    ) -> T:
        try:
            return read(body, kind)
        except encoding.WireError as error:
            raise PeerError(
                f"{self.base_url}{path} gave an answer of the wrong form ({error}): use the same version of shoal on "
                "both sides"
            ) from None

    # --- one call: attempts until an answer, a refusal or the deadline ---

    async def _call(self, call: "_Call") -> bytes:
        started = self._monotonic()
        pause_s, say_after_s = FIRST_RETRY_S, PATIENCE_S if self._reached else FIRST_PATIENCE_S
        end = math.inf if call.deadline_s is None else started + call.deadline_s
        failing_since = math.inf if self._reached else started  # an answer may have been held before it failed
        while True:
            attempted = self._monotonic()
            try:
                limit_s = call.timeout_s + len(call.body) / SLOWEST_BYTES_PER_S
                answer = await self._attempt(call, min(limit_s, end - self._monotonic()))
            except RetryableError as trouble:
                delay_s = max(pause_s * (0.5 + 0.5 * self._rng.random()), trouble.retry_s)
                if self._monotonic() + delay_s < end:
                    failing_since = min(failing_since, self._monotonic(), attempted + constants.LONG_POLL_S)
                    if (failing_s := self._monotonic() - failing_since) >= say_after_s:
                        say_after_s = 2 * failing_s
                        first = "" if self._reached else f". {self._advice(str(trouble))}"
                        self._on_wait(
                            f"waiting for {self.base_url} ({call.name}) for {failing_s:.0f} s: {trouble}{first}"
                        )
                    await self._sleep(delay_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)
                    if self._monotonic() < end:  # a busy machine sleeps longer
                        continue
                waited_s = self._monotonic() - started
                raise PeerError(
                    f"{self.base_url} gave no usable answer to {call.name} in {waited_s:.1f} s: {trouble}"
                ) from None
            else:
                self._reached = True
                return answer

    def _say_silent(self) -> None:
        """The first attempt takes long. A server that has answered before may hold a poll."""
        if not self._reached and not self._was_silent:
            self._was_silent = True
            self._on_wait(f"waiting for {self.base_url} for {FIRST_PATIENCE_S:.0f} s: no answer. {self._advice()}")

    def _advice(self, trouble: str = "") -> str:
        """What to check if the server has never answered: of a proxy that does not answer, the proxy alone."""
        proxy = self._network.proxy
        if proxy is None:
            return NEVER_ANSWERED
        if trouble.startswith("the proxy ") and "does not reach" not in trouble:
            return "Check the address of the proxy"
        return f"{NEVER_ANSWERED}, and that the proxy {redacted(proxy)} works"

    async def _attempt(self, call: "_Call", limit_s: float) -> bytes:
        """One request and its answer, within `limit_s`. Raises `RetryableError` if a retry may help, else `PeerError`."""
        content = call.body if len(call.body) <= PART_BYTES else _parts(call.body)
        length = {"content-length": str(len(call.body))} if call.body else {}
        silence_s = SILENCE_TIMEOUT_S + min(len(call.body), SEND_BUFFER_BYTES) / SLOWEST_BYTES_PER_S
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=silence_s)
        request = self._http.build_request(call.method, call.path, content=content, headers=length, timeout=timeout)
        if call.media_type:
            request.headers["content-type"] = call.media_type
        if self.key is not None:
            path, _, query = request.url.raw_path.decode("ascii").partition("?")
            signed = sign_request(
                self.key,
                RequestLine(call.method, path, query),
                call.digest or encoding.digest(call.body),
                created=int(self._clock()),
                nonce=secrets.token_urlsafe(16),
                sender=SenderState(self.run, self.head, self.manifest),
            )
            request.headers.update(signed)
        with map_http_errors(self.base_url, limit_s, lambda: self._reached):
            silent = asyncio.get_running_loop().call_later(FIRST_PATIENCE_S, self._say_silent)
            try:
                async with asyncio.timeout(limit_s):
                    response = await self._http.send(request, stream=True)
                    try:
                        body = await read_capped(response, call.cap)
                    finally:
                        await response.aclose()
            finally:
                silent.cancel()
        return self._judge(call, response, body)

    def _judge(self, call: "_Call", response: httpx.Response, body: bytes | None) -> bytes:
        status, ours = response.status_code, SHOAL in response.headers
        if status in _PASSING:
            self.answered_at = self._monotonic() if ours else self.answered_at
            reason = _refusal(body).error if ours else f"HTTP {status}"
            raise RetryableError(reason, retry_s=retry_after(response))
        # A proxy of the host that refuses a body by its size (413) always will.
        if not ours and self._reached and status != 413:  # guard: strangers-at-the-url-are-waited-out
            raise RetryableError(another_program(status))
        if not ours:
            raise self._not_shoal(call, response)
        if body is None:
            raise PeerError(f"{self.base_url}{call.path} answered with more than {call.cap} bytes: it was not read")
        promised = response.headers.get("content-digest")
        if promised is not None and promised != content_digest(encoding.digest(body)):
            raise RetryableError("the answer was damaged on the way. Check the connection")
        if status < 300:
            self.answered_at = self._monotonic()
            return body
        refusal = _refusal(body)
        if refusal.code in _DAMAGED:
            raise RetryableError(refusal.error)
        # guard: other-nodes-at-the-url-are-waited-out
        if refusal.code == _NO_CALL and self._reached and call.deadline_s is None:
            raise RetryableError(f"a shoal node without this call answers there now, with HTTP {status}, such as an "
                                 "origin or a "
                          "relay: the host is down, or its address leads elsewhere")  # fmt: skip
        if refusal.code == _OTHER_RUN and self.run and self._reached and call.deadline_s is None:
            raise RetryableError(
                f"another run is hosted there now: ask the host of run {self.run[:12]} for its new address"
            )
        self.answered_at = self._monotonic()
        if status == 404 and refusal.code != _NO_CALL:
            raise NothingYet(refusal.error)
        if status == 410:
            raise Superseded(refusal.error)
        raise PeerRefused(f"{self.base_url} refused {call.name}", status, refusal.code, refusal.error)

    def _not_shoal(self, call: "_Call", response: httpx.Response) -> PeerError:
        if response.is_redirect:
            return PeerError(f"{self.base_url} redirects to {location_of(response)}: give that URL instead")
        through = f" (through the proxy {redacted(self._network.proxy)})" if self._network.proxy else ""
        return PeerError(
            f"{self.base_url} is not a shoal node{through}: it answered {call.name} with HTTP {response.status_code} but "
            "no shoal-protocol header. Check the URL: it is the join line that `shoal host` prints"
        )


@dataclass(frozen=True)
class _Call:
    method: str
    path: str
    body: bytes = b""
    media_type: str = ""
    cap: int = constants.MAX_JSON_BYTES
    deadline_s: float | None = None
    timeout_s: float = constants.REQUEST_TIMEOUT_S
    digest: str = ""
    """SHA-256 of the body, hex, if it is already known."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path.partition('?')[0]}"


_PASSING = frozenset({408, 429, 500, 502, 503, 504, 507})
"""Statuses for which a retry may help."""

_NO_CALL = "no_such_call"
"""Refusal code of a node that is of another kind, or older."""

_OTHER_RUN = "wrong_run"
"""Refusal code of a coordinator that hosts another run than the one that a call names."""

_DAMAGED = frozenset({"digest", "truncated"})
"""Refusal codes that say that our request was damaged on the way."""


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PART_BYTES):
        yield body[start : start + PART_BYTES]


def _refusal(body: bytes | None) -> Refusal:
    try:
        refusal = encoding.from_json(body or b"", Refusal)
        return Refusal(error=refusal.error[:MAX_REASON_CHARS], code=refusal.code[:64])  # guard: short-refusals
    except encoding.WireError:
        return Refusal(error="the server gave no reason that can be read", code="unreadable")

"""HTTP requests to strangers: pinned addresses, capped answers, deadlines."""

import asyncio
import contextlib
import ipaddress
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import httpcore
import httpx

from shoal.errors import PeerError
from shoal.net import urls
from shoal.net.outbound_proxy import open_tunnel, proxy_error, proxy_for, redacted
from shoal.net.retryable_errors import PROXY, RetryableError, map_http_errors
from shoal.net.urls import port_of
from shoal.protocol.constants import PROTOCOL_VERSION

# --- Connections to strangers' servers ---
#
# Before its answer, a server may send interim ones (HTTP 1xx), which httpcore skips however many come. At the full rate
# of a line they would keep a process from everything else. httpx reads where a redirect leads even if it follows none,
# and sends cookies back; both raise errors of their own for some values.


MOST_HEAD_BYTES = 16 << 10
"""Of interim answers and headers before the body of an answer."""

USER_AGENT = f"shoal/{PROTOCOL_VERSION}"

_DEFAULT = httpx.Limits()


def location_of(response: httpx.Response) -> str:
    """Where a redirect leads, as a server said it: any text."""
    return str(response.extensions.get("location", response.headers.get("location", "?")))


class HardenedTransport(httpx.AsyncHTTPTransport):
    """The network, for servers of strangers. `location_of` has what it takes off an answer."""

    def __init__(
        self, *, verify: bool | ssl.SSLContext, limits: httpx.Limits = _DEFAULT, proxy: httpx.URL | None = None
    ) -> None:
        """A `proxy` connects to servers with TLS, and forwards requests to the others."""
        super().__init__(verify=verify, limits=limits, trust_env=False, proxy=None if verify else proxy)
        self._pool._network_backend = _Backend(self._pool._network_backend, proxy, bool(verify))
        self._forwarding = None if verify else proxy

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and read the beginning of its answer."""
        response = await super().handle_async_request(request)
        if self._forwarding is not None and response.status_code == 407:
            await response.aclose()
            raise proxy_error(self._forwarding, 407, request.url.host)
        if isinstance(stream := response.extensions.get("network_stream"), _Stream):
            stream.left_bytes = None
        for name in ("location", "set-cookie"):
            response.extensions[name] = response.headers.pop(name, "?")  # guard: headers-of-strangers
        return response


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that reads few bytes between a request and the body of its answer."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        self.left_bytes: int | None = MOST_HEAD_BYTES
        """Of the answer's head; None within its body."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self.left_bytes is None:
            return await self._inner.read(max_bytes, timeout)
        if self.left_bytes == 0:  # guard: head-of-an-answer
            raise httpcore.RemoteProtocolError(f"it sent {MOST_HEAD_BYTES} bytes and no answer")
        data = await self._inner.read(min(max_bytes, self.left_bytes), timeout)
        self.left_bytes -= len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.left_bytes = MOST_HEAD_BYTES
        await self._inner.write(buffer, timeout)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self, inner: httpcore.AsyncNetworkBackend, proxy: httpx.URL | None, tunnels: bool) -> None:
        """`tunnels`: whether the proxy connects to servers, and does not get the requests themselves."""
        self._inner, self._proxy, self._tunnels = inner, proxy, tunnels

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        at = (host, port) if self._proxy is None else (self._proxy.host, self._proxy.port or 80)
        try:
            stream = _Stream(await self._inner.connect_tcp(*at, timeout, local_address, socket_options))
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            if self._proxy is None:
                raise
            unreached = str(error) or type(error).__name__
            raise httpcore.ConnectError(f"{PROXY} {redacted(self._proxy)} does not answer: {unreached}") from error
        if self._proxy is not None and self._tunnels:
            is_connected = False
            try:
                await open_tunnel(stream, self._proxy, host, port, timeout)
                is_connected = True
            finally:
                if not is_connected:
                    await stream.aclose()
        return stream


# --- Connections to one server that stay on its side ---
#
# A host decides where its name leads. It could let the name lead to itself while a volunteer joins, and into the
# volunteer's own network afterwards. So the side is decided once, by the address that answered, and later connections go
# only to addresses that were judged. It reads nothing of an answer but whether it is a shoal node's.


SHOAL = "shoal-protocol"
"""The header that every answer of a shoal node has."""


class PinnedSideTransport(httpx.AsyncBaseTransport):
    """The network, for one server."""

    def __init__(self, host: str, *, verify: bool, limits: httpx.Limits) -> None:
        self.proxy = proxy_for("https" if verify else "http", host)
        self._inner = HardenedTransport(verify=verify, limits=limits, proxy=self.proxy)
        self._by_name = verify and self.proxy is not None
        """Whether the proxy may look the name up if this machine cannot: what it then reaches proves its name by TLS."""
        self.inside: bool | None = None
        """Whether the server is inside a network; None: it has not answered yet."""
        self.address = ""
        """Where it answered last."""
        self._failed = False
        with contextlib.suppress(ValueError):
            self.inside = not urls.is_outside(str(ipaddress.ip_address(host)))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request: to an address outside, if the server is outside; through a proxy, to one that was looked up here,
        because a proxy is inside and would follow a name anywhere."""
        # guard: outside-stays-outside, proxy-follows-no-name
        if self.inside is False or (self.inside is None and self.proxy is not None):
            await self._aim(request)
        try:
            response = await self._inner.handle_async_request(request)
        except httpx.TransportError:
            self._failed = True
            raise
        if self.inside is None and SHOAL in response.headers:
            if self.proxy is None:
                self.address = _peer_of(response)
            self.inside = bool(self.address) and not urls.is_outside(self.address)
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()

    async def _aim(self, request: httpx.Request) -> None:
        host, port = request.url.host, port_of(request.url)
        if not self.address or self._failed:
            self.address, self._failed = await self._next_address(host, port), False
        if not self.address:
            return
        request.extensions = {**request.extensions, "sni_hostname": host}
        request.url = request.url.copy_with(host=self.address)

    async def _next_address(self, host: str, port: int) -> str:
        """An address of the name: the one after that which failed. Raises `RetryableError`, and `httpx.ConnectError`."""
        try:
            found = await urls.addresses_of(host, port)
        except (OSError, UnicodeError) as error:
            if self._by_name:
                return ""
            if self.proxy is not None:
                raise PeerError(
                    f"the address of {host} is not known here, and over http:// no proxy is asked for it, because the name "
                    "could lead it inside this network: use https://, or an address"
                ) from None
            raise httpx.ConnectError(str(error)) from error
        if self.inside is None:
            return found[(found.index(self.address) + 1) % len(found) if self.address in found else 0]
        outside = [address for address in found if urls.is_outside(address)]
        if not outside:
            raise RetryableError(
                f"{host} was outside when it first answered and is {', '.join(found)[:80]} now, inside a network: it is "
                "not called there. If you moved into the host's network, start again"
            )
        return outside[(outside.index(self.address) + 1) % len(outside) if self.address in outside else 0]


def _peer_of(response: httpx.Response) -> str:
    stream = response.extensions.get("network_stream")
    address = stream.get_extra_info("server_addr") if stream is not None else None
    return str(address[0]) if address else ""


# --- The body of a stranger's answer, part by part as it comes, unless its parts are very small ---
#
# Each part costs CPU time, and all that are in one read are handled before any other task runs. So a server that sends
# chunks of one byte at the full rate of its line would keep a process from everything else. A slow line brings small
# parts, too, but few in a second.


FEW_PARTS, PARTS_PER_S, LEAST_BYTES = 64, 200.0, 512
"""An answer may have so many parts, so many more in each second, and one more for each so many bytes."""


async def raw_parts(
    response: httpx.Response, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[bytes, None]:
    """The parts of an answer's body, not decoded. Raises `RetryableError` if they are small and come fast."""
    began, count, num_bytes = clock(), 0, 0
    async for part in response.aiter_raw():
        count, num_bytes = count + 1, num_bytes + len(part)
        most = FEW_PARTS + PARTS_PER_S * (clock() - began) + num_bytes / LEAST_BYTES
        if count > most:  # guard: parts-of-an-answer
            raise RetryableError(f"sends its answer in parts of {num_bytes / count:.0f} bytes")
        yield part


async def read_capped(
    response: httpx.Response, cap: int, take: Callable[[bytes], object] | None = None
) -> bytes | None:
    """The body, or None if it has more than `cap` bytes; `take` gets it part by part instead. Raises `RetryableError` if it
    ends early, or comes in tiny parts."""
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > cap:
        return None
    body, num_bytes = bytearray(), 0
    async for part in raw_parts(response):
        num_bytes += len(part)
        if num_bytes > cap:  # guard: size-of-an-answer
            return None
        (take or body.extend)(part)
    if declared.isdecimal() and num_bytes != int(declared):
        raise RetryableError(f"the answer ended after {num_bytes} of {declared} bytes. Check the connection")
    return bytes(body)


# --- one GET ---
#
# Of a URL that a stranger gave, only at an address that was judged. What comes back is as hostile as the URL.


LOOK_UP_S = 5.0

SILENCE_S, CONNECT_S = 30.0, 10.0
"""A server that sends nothing for so long counts as gone, and so does one that takes no connection."""

KNOWN = None
"""In the place of an address: the user gave the URL, so its name may lead anywhere, and the user's proxy looks it up."""


class Answer(NamedTuple):
    """An answer that is no redirect."""

    status: int
    headers: httpx.Headers
    body: bytes
    """Of a good one; empty of others."""


async def judged_address(url: httpx.URL, own: str = "") -> str:
    """An address of a stranger's host that may be called: outside, or the stranger's `own`. Raises `PeerError`."""
    try:
        return await asyncio.wait_for(urls.outside_address(url.host, port_of(url), own), LOOK_UP_S)
    except (OSError, TimeoutError, UnicodeError):
        raise PeerError(f"the address of {url.host} was not found: check the name and its DNS records") from None


async def get(
    url: httpx.URL,
    *,
    cap: int,
    deadline_s: float,
    address: str | None,
    headers: Mapping[str, str] = MappingProxyType({}),
    take: Callable[[bytes], object] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Answer:
    """One GET: its headers alone if `cap` is 0, else also its body, of at most `cap` bytes, within `deadline_s` in all.

    `address`: the judged one, of a stranger's URL, or KNOWN. `take` gets the body part by part instead. Raises
    `RetryableError` for trouble that may pass, and `PeerError`, also for a redirect and for a longer body.
    """
    proxy = proxy_for(url.scheme, url.host) if address is None else None
    network = transport or HardenedTransport(verify=url.scheme == "https", proxy=proxy)
    http = httpx.AsyncClient(transport=network, trust_env=False, timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S))
    named = {"host": url.netloc.decode("ascii"), "accept-encoding": "identity", "user-agent": USER_AGENT, **headers}
    at = url if address is None else url.copy_with(host=address)
    # guard: no-redirects
    asked = http.stream("GET", at, headers=named, extensions={"sni_hostname": url.host}, follow_redirects=False)
    is_reached = False
    with map_http_errors(str(url), deadline_s, lambda: is_reached):
        async with asyncio.timeout(deadline_s), http, asked as response:  # guard: slow-registry-ends
            is_reached = True
            if response.is_redirect:  # guard: no-redirect-of-relays
                to = location_of(response)[:200]
                raise PeerError(
                    f"{url} redirects to {to!r}, which is not followed: give that URL instead, if you trust it"
                )
            body = await read_capped(response, cap, take) if cap and response.is_success else b""
            if body is None:
                raise PeerError(f"{url} has more than {cap} bytes: it was not read")
            return Answer(response.status_code, response.headers, body)

"""Connections to strangers' servers: their answers must begin soon, and httpx acts on none of their headers.

Called by those who ask such servers. Before its answer, a server may send interim ones (HTTP 1xx), which httpcore skips
however many come. At the full rate of a line they would keep a process from everything else. httpx reads where a redirect
leads even if it follows none, and sends cookies back; both raise errors of their own for some values.
"""

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from shoal.net.forward_proxy import open_tunnel, proxy_error, redacted
from shoal.net.trouble import PROXY

MOST_HEAD_BYTES = 16 << 10
"""Of interim answers and headers before the body of an answer."""

_DEFAULT = httpx.Limits()


def location_of(response: httpx.Response) -> str:
    """Where a redirect leads, as a server said it: any text."""
    return str(response.extensions.get("location", response.headers.get("location", "?")))


class StrangersTransport(httpx.AsyncHTTPTransport):
    """The network, for servers of strangers. `location_of` has what it takes off an answer."""

    def __init__(self, *, verify: bool, limits: httpx.Limits = _DEFAULT, proxy: httpx.URL | None = None) -> None:
        """A `proxy` connects to servers with TLS, and forwards requests to the others."""
        super().__init__(verify=verify, limits=limits, trust_env=False, proxy=None if verify else proxy)
        self._pool._network_backend = _Backend(self._pool._network_backend, proxy, verify)
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
    """Opens such connections."""

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

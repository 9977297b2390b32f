"""Connections to one server that stay on its side: outside, if it was outside when it first answered.

Called by `client`. A host decides where its name leads. It could let the name lead to itself while a volunteer joins, and
into the volunteer's own network afterwards. So the side is decided once, by the address that answered, and later
connections go only to addresses that were judged. It reads nothing of an answer but whether it is a shoal node's.
"""

import contextlib
import ipaddress

import httpx

from shoal.errors import PeerError
from shoal.net import addresses
from shoal.net.forward_proxy import proxy_for
from shoal.net.strangers import StrangersTransport
from shoal.net.trouble import Trouble
from shoal.net.urls import port_of

SHOAL = "shoal-protocol"
"""The header that every answer of a shoal node has."""


class SidedTransport(httpx.AsyncBaseTransport):
    """The network, for one server."""

    def __init__(self, host: str, *, verify: bool, limits: httpx.Limits) -> None:
        self.proxy = proxy_for("https" if verify else "http", host)
        self._inner = StrangersTransport(verify=verify, limits=limits, proxy=self.proxy)
        self._by_name = verify and self.proxy is not None
        """Whether the proxy may look the name up if this machine cannot: what it then reaches proves its name by TLS."""
        self.inside: bool | None = None
        """Whether the server is inside a network; None: it has not answered yet."""
        self.address = ""
        """Where it answered last."""
        self._failed = False
        with contextlib.suppress(ValueError):
            self.inside = not addresses.is_outside(str(ipaddress.ip_address(host)))

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
            self.inside = bool(self.address) and not addresses.is_outside(self.address)
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
        """An address of the name: the one after that which failed. Raises `Trouble`, and `httpx.ConnectError`."""
        try:
            found = await addresses.addresses_of(host, port)
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
        outside = [address for address in found if addresses.is_outside(address)]
        if not outside:
            raise Trouble(
                f"{host} was outside when it first answered and is {', '.join(found)[:80]} now, inside a network: it is "
                "not called there. If you moved into the host's network, start again"
            )
        return outside[(outside.index(self.address) + 1) % len(outside) if self.address in outside else 0]


def _peer_of(response: httpx.Response) -> str:
    """The address of the server that sent an answer."""
    stream = response.extensions.get("network_stream")
    address = stream.get_extra_info("server_addr") if stream is not None else None
    return str(address[0]) if address else ""

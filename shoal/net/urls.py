"""URLs and addresses of strangers: which are well formed, and which are public."""

import asyncio
import ipaddress
import re
import socket

import httpx

from shoal.errors import PeerError
from shoal.protocol.constants import MAX_URL_CHARS

# --- URLs that users type and strangers offer ---


FORM = "http(s)://HOST[:PORT][/PATH]"

WEB_PORTS = (80, 443)

FIRST_FREE_PORT = 1024
"""Lower ports, but for those of the web, belong to other services, which must not be called."""

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]+", re.ASCII)
"""A name or an address. Anything that would have to be escaped is a typing error."""


def server_url(base_url: str) -> str:
    """The URL of a server that a user typed, in one form. Raises `PeerError`."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise PeerError(f"{base_url!r} is not a URL ({error}): write it as http://HOST:PORT or https://HOST") from None
    if url.scheme not in ("http", "https") or not _HOST.fullmatch(url.raw_host.decode("ascii")):
        raise PeerError(f"{base_url!r} is not a URL of a node: write it as http://HOST:PORT or https://HOST")
    if url.port is not None and not 0 < url.port < 65536:
        raise PeerError(f"{base_url!r} has port {url.port}, and ports are from 1 to 65535: copy the host's join line")
    if url.path not in ("", "/") or url.query or url.fragment or url.userinfo:
        raise PeerError(f"{base_url!r} has more than the node's address: use only {url.scheme}://{url.netloc.decode()}")
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def checked_url(text: str) -> httpx.URL:
    """A stranger's URL, if it may be called at all. Raises `PeerError`."""
    if len(text) > MAX_URL_CHARS:
        raise PeerError(f"the URL has {len(text)} characters, limit {MAX_URL_CHARS}: offer a shorter one")
    try:
        url = httpx.URL(text.rstrip("/"))
        port = url.port
        url.host.encode("idna")  # refuses parts that are empty or too long  # guard: names-of-strangers
    except (httpx.InvalidURL, ValueError) as error:
        raise PeerError(f"{text!r} is not a URL ({error}): write it as {FORM}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise PeerError(f"{text!r} is not a web address: write it as {FORM}")
    if url.userinfo or url.query or url.fragment or "@" in text:  # guard: plain-url
        raise PeerError(f"{text!r} has a user, a query or a fragment: write it as {FORM}")
    demand_port(port)
    return url


def demand_port(port: int | None) -> None:
    """Raise `PeerError` for a port of other services than a stranger may have called; None is that of the scheme."""
    if port is not None and port not in WEB_PORTS and not FIRST_FREE_PORT <= port < 65536:  # guard: odd-ports
        raise PeerError(
            f"port {port} may be of another service: use port 80, 443, or one from {FIRST_FREE_PORT} to 65535"
        )


def port_of(url: httpx.URL) -> int:
    """The port that a URL means."""
    return url.port or (443 if url.scheme == "https" else 80)


# --- Which network addresses are outside ---
#
# Called before a URL that a stranger gave is asked. Otherwise a stranger could let this machine call its own services, or
# those of its network. A name is looked up here and the caller connects to the address that was judged, so a name that
# changes its address gains nothing.


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_EMBEDS_IPV4 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that a gateway of the network turns into those of their last 32 bits."""


def is_outside(text: str) -> bool:
    """Whether an IP address belongs to the internet: not private, loopback, link-local, multicast or reserved.

    An IPv6 address that carries an IPv4 address is judged by both.
    """
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_outside(str(address.ipv4_mapped))
        if address in _EMBEDS_IPV4:
            return is_outside(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.sixtofour is not None or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order in which to try them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


async def outside_address(host: str, port: int, own: str = "") -> str:
    """An address of a name that a stranger gave. Raises `PeerError` if one of them is inside, and not the stranger's `own`,
    and OSError."""
    found = await addresses_of(host, port)
    inside = [address for address in found if not is_outside(address) and address != own]
    if inside or not found:  # guard: nothing-inside, registered-inside
        raise PeerError(
            f"{host} is {', '.join(inside)[:80] or 'nowhere'}, an address inside a network: give one that others reach, as "
            "your router's with the port forwarded. Only a run that is itself inside may name it"
        )
    return found[0]


def below(url: httpx.URL, path: str) -> httpx.URL:
    """The URL of a path below another."""
    return url.copy_with(path=f"{url.path.rstrip('/')}{path}")

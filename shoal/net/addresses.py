"""Which network addresses are outside: on the internet, and not inside the network of this machine.

Called before a URL that a stranger gave is asked. Otherwise a stranger could let this machine call its own services, or
those of its network. A name is looked up here and the caller connects to the address that was judged, so a name that
changes its address gains nothing.
"""

import asyncio
import ipaddress
import socket

from shoal.errors import PeerError

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


async def outside_address(host: str, port: int) -> str:
    """An address of a name that a stranger gave. Raises `PeerError` if one of them is inside, and OSError."""
    found = await addresses_of(host, port)
    inside = [address for address in found if not is_outside(address)]
    if inside or not found:  # guard: nothing-inside
        raise PeerError(
            f"{host} is {', '.join(inside)[:80] or 'nowhere'}: an address inside a network. Only a run that is itself "
            "inside one may have such sources"
        )
    return found[0]

"""Shares of few places that many strangers want: nobody gets all of them with many addresses of one network.

Called by the list of relays and by the queue of their challenges. Pure.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterable

OF_IPV4, OF_IPV6 = 24, 48
"""Bits of an address that name its crowd. One customer may have all addresses of a crowd."""


def crowd_of(host: str) -> str:
    """The network whose addresses share places, by an address; what is no address is a crowd of its own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ipaddress.ip_network((address, OF_IPV4 if address.version == 4 else OF_IPV6), strict=False))


def gives_way(crowds: Iterable[str], newcomer: str) -> str | None:
    """Which crowd gives a place to one more of the newcomer's crowd, if all places are taken: the largest one, unless it
    would then be the smaller of the two."""
    counts = Counter(crowds)
    largest = max(counts, key=lambda crowd: counts[crowd], default=newcomer)
    return largest if counts[largest] >= counts[newcomer] + 2 else None

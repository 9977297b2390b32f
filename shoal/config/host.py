"""The section of a run file that is about the host's machine alone.

Read by `sections`, and like it made from TOML by `load`.
"""

import contextlib
import ipaddress
from typing import Literal

from shoal.tree import Section


class HostConfig(Section, frozen=True):
    """Where the coordinator listens, and how the processes of the host share a device."""

    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 takes requests from other machines."""
    port: int = 0
    """0 takes a free port and keeps it for resuming."""
    public_url: str = ""
    """URL that others type, if a proxy with TLS is in front of the coordinator."""
    origin_port: int = 0
    """Port of the origin, which serves chunks of weights; 0 takes a free one and keeps it for resuming."""
    origin_url: str = ""
    """URL below which others fetch chunks by their hashes: of a proxy before the origin, a CDN or a bucket. Empty: at the
    origin's port; behind a proxy, from the coordinator."""
    dashboard: bool = True
    """Whether `shoal host` also serves the page of the run, in a process of its own."""
    dashboard_port: int = 0
    """Port of the page; 0 takes a free one and keeps it for resuming."""
    dashboard_url: str = ""
    """URL at which others reach the page, if a proxy is in front of it."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses or networks of proxies: their X-Forwarded-For is believed, and they have no limit by address."""

    shifts: Literal["auto", "on", "off"] = "auto"
    """Whether the run's processes that compute on one device of this machine have its memory one after another. auto: if a
    GPU cannot hold them all at once, but each alone. on: also on a CPU, where it gains nothing."""

    @property
    def is_reached_by_others(self) -> bool:
        """Whether other machines can send requests: directly, or through a proxy with a public URL."""
        return bool(self.public_url) or not is_loopback(self.bind)  # guard: public-url-is-a-way-in


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address. A name other than localhost may be any machine's."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"

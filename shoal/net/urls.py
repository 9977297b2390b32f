"""URLs that users type and strangers offer: in one form, or refused with what to write.

Called by clients, by those who ask servers of strangers, and by the command line. It opens no connection and looks up no
name: whether an address may be called is for `addresses` and `outside`.
"""

import re

import httpx

from shoal.errors import PeerError
from shoal.protocol.constants import MAX_URL_CHARS

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

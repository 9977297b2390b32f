"""One small request to a server that a stranger named: at an address that was judged, without redirects, within limits.

Called by the coordinator for the challenges and probes of relays. What comes back is as hostile as the URL.
"""

import asyncio

import httpx

from shoal.errors import PeerError
from shoal.net.addresses import addresses_of, is_outside
from shoal.net.parts import raw_parts
from shoal.net.strangers import StrangersTransport
from shoal.net.trouble import Trouble, troubles
from shoal.protocol.constants import MAX_URL_CHARS

LOOK_UP_S = 5.0

FORM = "http(s)://HOST[:PORT][/PATH]"

WEB_PORTS = (80, 443)

FIRST_FREE_PORT = 1024
"""Lower ports, but for those of the web, belong to other services, which must not be called."""


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


async def judged_address(url: httpx.URL, own: str = "") -> str:
    """An address of a stranger's host that may be called: outside, or the stranger's `own`. Raises `PeerError`."""
    try:
        found = await asyncio.wait_for(addresses_of(url.host, port_of(url)), LOOK_UP_S)
    except (OSError, TimeoutError, UnicodeError):
        raise PeerError(f"the address of {url.host} was not found: check the name and its DNS records") from None
    # guard: registered-inside
    if not found or not all(is_outside(address) or (own and address == own) for address in found):
        raise PeerError(
            f"{url.host} is {', '.join(found)[:80] or 'nowhere'}, an address inside a network: offer one that others "
            "reach from outside, such as your router's with the port forwarded"
        )
    return found[0]


async def ask(
    url: httpx.URL,
    address: str,
    path: str,
    *,
    cap: int,
    limit_s: float,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """The status and at most `cap` bytes of `GET url/path` at this address, in `limit_s` in all. Raises `PeerError`."""
    below = url.copy_with(path=f"{url.path.rstrip('/')}{path}", host=address)
    try:
        with troubles(str(url), limit_s, lambda: True):
            async with (
                asyncio.timeout(limit_s),
                httpx.AsyncClient(
                    transport=StrangersTransport(verify=url.scheme == "https"), trust_env=False, follow_redirects=False
                ) as http,
                http.stream(
                    "GET",
                    below,
                    headers={"host": url.netloc.decode("ascii"), "accept-encoding": "identity", **(headers or {})},
                    extensions={"sni_hostname": url.host},
                    timeout=limit_s,
                ) as response,
            ):
                if response.is_redirect:
                    raise PeerError(
                        f"{url} redirects, and no redirect is followed: offer the URL that it leads to"
                    )  # guard: no-redirect-of-relays
                body = bytearray()  # a copy for each part would take seconds
                async for part in raw_parts(response):
                    body += part[: cap - len(body)]
                    if len(body) >= cap:
                        break
                return response.status_code, bytes(body)
    except Trouble as trouble:
        raise PeerError(f"{url}: {trouble}") from None

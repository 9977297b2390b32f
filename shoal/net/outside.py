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
from shoal.net.urls import port_of

LOOK_UP_S = 5.0


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

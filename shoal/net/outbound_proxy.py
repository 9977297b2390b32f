"""The forward proxy through which this process calls servers, if its user asks for one.

Chosen once, by the command line, and read by those who open connections to servers elsewhere. A proxy is inside its user's
network, and looks names up there. So callers look them up themselves, judge the addresses as without a proxy, and name the
proxy an address: no name of a stranger leads it to a machine inside.
"""

import base64
from collections.abc import Callable
from urllib.parse import unquote

import httpcore
import httpx

from shoal.config.process_environment import names_proxy, proxy_named
from shoal.errors import ConfigError, PeerError

ENVIRONMENT = "env"
"""What a user types for the proxy that HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY name."""

FORM = "http://[USER:PASSWORD@]HOST:PORT"

ESCAPES = "In USER and PASSWORD write / as %2F, # as %23, ? as %3F, @ as %40, : as %3A and % as %25"

MAX_ANSWER_BYTES = 16 << 10
"""Of a proxy, before it has connected."""

_choice: list[Callable[[str, str], str]] = []


def use_proxy(text: str) -> None:
    """From now on, call servers through this proxy: a URL, or `ENVIRONMENT`. Raises `ConfigError`."""
    _choice.clear()
    if text == ENVIRONMENT:
        if not names_proxy():
            raise ConfigError(
                f"--proxy {ENVIRONMENT}: none of HTTPS_PROXY, HTTP_PROXY and ALL_PROXY is set, so servers would be called "
                "directly: set one, or leave --proxy out"
            )
        _choice.append(proxy_named)
    elif text:
        proxy_of(text)
        _choice.append(lambda scheme, host: text)


def proxy_for(scheme: str, host: str) -> "httpx.URL | None":
    """The proxy for a server, by the scheme of its URL and its name; None to call it directly. Raises `ConfigError`."""
    named = _choice[0](scheme, host) if _choice else ""
    return proxy_of(named) if named else None


def proxy_of(text: str) -> httpx.URL:
    """A proxy's URL. Raises `ConfigError`, which tells no password."""
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
        readable = b"@" not in url.raw_path and "@" not in url.fragment
    except httpx.InvalidURL:  # its text may hold a part of the password
        readable = False
    if not readable:
        raise ConfigError(f"the proxy's URL cannot be read: write it as {FORM}. {ESCAPES}")
    if url.scheme != "http" or not url.host:
        raise ConfigError(f"a proxy at {url.scheme}://{url.host} is not supported: write it as {FORM}")
    return url.copy_with(path="/", query=None, fragment=None)


def redacted(proxy: httpx.URL) -> str:
    """A proxy in words, without its password."""
    return f"{proxy.host}:{proxy.port or 80}"


def proxy_error(proxy: httpx.URL, status: int, place: str) -> PeerError:
    """The error for a proxy that does not let us call a server."""
    if status == 407:
        if proxy.userinfo:
            return PeerError(f"the proxy {redacted(proxy)} refuses this user and password: check both. {ESCAPES}")
        return PeerError(f"the proxy {redacted(proxy)} wants a user and a password: write it as {FORM}")
    return PeerError(
        f"the proxy {redacted(proxy)} does not connect to {place} (HTTP {status}): ask its administrator to allow it. Most "
        "allow https:// at port 443 alone"
    )


async def open_tunnel(
    stream: httpcore.AsyncNetworkStream, proxy: httpx.URL, host: str, port: int, timeout: float | None
) -> None:
    """Let a proxy connect a stream to a server (HTTP CONNECT). Raises `PeerError`, or `httpcore.ConnectError` if it may
    pass."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    if proxy.userinfo:
        user = unquote(proxy.userinfo.decode("ascii"))
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}")
    await stream.write("\r\n".join([*lines, "", ""]).encode(), timeout)
    head = b""
    while b"\r\n\r\n" not in head:
        part = await stream.read(4096, timeout)
        head += part
        if not part or len(head) > MAX_ANSWER_BYTES:
            raise httpcore.ConnectError(f"the proxy {redacted(proxy)} gave no answer that can be read")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/1.") and words[1].isdigit() else 0
    if 200 <= status < 300:
        return
    if status in (0, 502, 503, 504):
        raise httpcore.ConnectError(f"the proxy {redacted(proxy)} does not reach {place} (HTTP {status})")
    raise proxy_error(proxy, status, place)

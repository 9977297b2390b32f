"""A registry behind HTTP: any web server that serves the registry's folder, or a coordinator.

Made by `registry` for a URL. It follows no redirect, so a registry cannot make this machine call an address that its user
did not give; it uses no proxy of the process environment; and each answer has limits of size and time. Its methods block,
and need a thread without an event loop of its own.
"""

import asyncio
import io
import ssl
import time
from collections.abc import Callable
from typing import BinaryIO

import httpx

from shoal.errors import ConfigError, NothingYet, PeerError
from shoal.net.forward_proxy import proxy_for
from shoal.net.trouble import Trouble, troubles

ATTEMPTS = 3
"""How often a request is made, if its answer does not come or ends early."""

PAUSE_S = 1.0
"""Between two attempts."""

SILENCE_S = 30.0
"""A server that sends nothing for this long counts as gone."""

SLOWEST_BYTES_PER_S = 20_000
"""A whole answer, headers and the end of its last chunk included, may take SILENCE_S and the time of its bytes at this
rate."""


class WebRegistry:
    """A registry at a URL."""

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises `ConfigError` for a URL that is not http or https."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL ({error}): write https://host/path") from None
        if (
            parsed.scheme not in ("http", "https")
            or not parsed.host
            or parsed.userinfo
            or parsed.query
            or parsed.fragment
        ):
            raise ConfigError(
                f"{url!r} cannot be the URL of a registry: write https://host/path, without user, query and fragment"
            )
        self.place = url.rstrip("/")
        self._transport, self._sleep = transport, sleep
        self._proxy = proxy_for(parsed.scheme, parsed.host)
        self._tls = ssl.create_default_context() if parsed.scheme == "https" else False

    def read(self, path: str, cap: int) -> bytes:
        into = io.BytesIO()
        self._ask(path, cap, into, exactly=False)
        return into.getvalue()

    def copy(self, path: str, size: int, into: BinaryIO) -> None:
        self._ask(path, size, into, exactly=True)

    def _ask(self, path: str, most: int, into: BinaryIO, exactly: bool) -> None:
        """Write the answer into a file. Raises `PeerError`."""
        start = into.tell()
        for attempt in range(1, ATTEMPTS + 1):
            into.seek(start)
            into.truncate()
            try:
                return asyncio.run(self._answer(path, most, into, exactly))
            except Trouble as trouble:
                if attempt == ATTEMPTS:
                    raise PeerError(f"{self.place} gave no usable answer in {ATTEMPTS} attempts: {trouble}") from None
                self._sleep(PAUSE_S)

    async def _answer(self, path: str, most: int, into: BinaryIO, exactly: bool) -> None:
        """One attempt. The time-outs of a socket never end a server that drips headers or `100 Continue`, so another one
        is around the whole answer."""
        limit_s = SILENCE_S + most / SLOWEST_BYTES_PER_S
        client = httpx.AsyncClient(
            transport=self._transport,
            verify=self._tls,
            proxy=self._proxy,
            trust_env=False,
            timeout=httpx.Timeout(SILENCE_S, connect=10.0),
            headers={"accept-encoding": "identity", "user-agent": "shoal"},
        )
        client.follow_redirects = False  # guard: no-redirects
        reached, taken = False, 0
        with troubles(self.place, limit_s, lambda: reached):
            # guard: slow-registry-ends
            async with asyncio.timeout(limit_s), client, client.stream("GET", f"{self.place}/{path}") as response:
                reached = True
                self._demand_file(response, path)
                async for part in response.aiter_raw():
                    taken += len(part)
                    if taken > most:  # guard: size-of-an-answer
                        raise PeerError(f"{self.place}/{path} has more than {most} bytes: use another registry")
                    into.write(part)
        if exactly and taken < most:
            raise Trouble(f"{path} ended after {taken} of {most} bytes")

    def _demand_file(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if response.is_redirect:
            target = response.headers.get("location", "?")[:200]
            raise PeerError(f"{self.place} redirects to {target}: give that URL instead, if you trust it")
        if status in (404, 410):
            raise NothingYet(f"{self.place} has no {path}: check the name, or use another registry")
        if status in (408, 429) or status >= 500:
            raise Trouble(f"HTTP {status}")
        if status != 200:
            raise PeerError(f"{self.place} answered {path} with HTTP {status}: check the registry's URL")

"""A registry behind HTTP: any web server that serves the registry's folder, or a coordinator.

Made by `registry` for a URL. It follows no redirect, so a registry cannot make this machine call an address that its user
did not give; it uses no proxy of the process environment; and each answer has limits of size and time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeVar

import httpx

from shoal.errors import ConfigError, NothingYet, PeerError
from shoal.net.trouble import Trouble, troubles

T = TypeVar("T")

ATTEMPTS = 3
"""How often a request is made, if its answer does not come or ends early."""

PAUSE_S = 1.0
"""Between two attempts."""

SILENCE_S = 30.0
"""A server that sends nothing for this long counts as gone."""

SLOWEST_BYTES_PER_S = 20_000
"""An answer may take SILENCE_S, and the time of its bytes at this rate."""


class WebRegistry:
    """A registry at a URL."""

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
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
                f"{url!r} is not the URL of a registry: write https://host/path, without user, query and fragment"
            )
        self.place = url.rstrip("/")
        self._clock, self._sleep = clock, sleep
        self._http = httpx.Client(
            transport=transport,
            verify=parsed.scheme == "https",
            trust_env=False,
            timeout=httpx.Timeout(SILENCE_S, connect=10.0),
            headers={"accept-encoding": "identity", "user-agent": "shoal"},
        )
        self._http.follow_redirects = False  # guard: no-redirects

    def read(self, path: str, cap: int) -> bytes:
        def take() -> bytes:
            data = bytearray()
            for part in self._parts(path, cap):
                data += part
                if len(data) > cap:  # guard: size-of-an-answer
                    raise PeerError(f"{self.place}/{path} has more than {cap} bytes: it was not read")
            return bytes(data)

        return self._tried(take)

    def copy(self, path: str, size: int, into: BinaryIO) -> None:
        start = into.tell()

        def take() -> None:
            into.seek(start)
            into.truncate()
            taken = 0
            for part in self._parts(path, size):
                taken += len(part)
                if taken > size:  # guard: size-of-an-archive
                    break
                into.write(part)
            if taken != size:
                raise Trouble(f"{self.place}/{path} does not have the {size} bytes that its catalogue says")

        self._tried(take)

    def _tried(self, take: Callable[[], T]) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return take()
            except Trouble as trouble:
                if attempt == ATTEMPTS:
                    raise PeerError(f"{self.place} gave no usable answer in {ATTEMPTS} attempts: {trouble}") from None
                self._sleep(PAUSE_S)
        raise AssertionError("unreachable")

    def _parts(self, path: str, most: int) -> Iterator[bytes]:
        """The bytes at a path as they come. Raises `Trouble`, `NothingYet` or `PeerError`."""
        limit_s = SILENCE_S + most / SLOWEST_BYTES_PER_S
        until = self._clock() + limit_s
        with self._answer(path, limit_s) as response:
            for part in response.iter_raw():
                if self._clock() > until:  # guard: slow-registry-ends
                    raise Trouble(f"{self.place}/{path} comes slower than {SLOWEST_BYTES_PER_S} bytes a second")
                yield part

    @contextmanager
    def _answer(self, path: str, limit_s: float) -> Iterator[httpx.Response]:
        with (
            troubles(self.place, limit_s, lambda: False),
            self._http.stream("GET", f"{self.place}/{path}") as response,
        ):
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
            yield response

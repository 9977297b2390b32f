"""Sources of chunks: the coordinator, and any web server that serves files by their hash.

`fetch` asks them, and trusts none. An ordinary web server, CDN or bucket will do: it needs `GET` of a path that ends with
the hash, and should know `Range`. A source that a stranger named is asked at addresses outside only, and no redirect is
followed.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeGuard

import httpx

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.net.outbound_proxy import proxy_for
from shoal.net.retryable_errors import RetryableError, another_program, map_http_errors, retry_after
from shoal.net.safe_http import SHOAL, USER_AGENT, HardenedTransport, location_of, raw_parts, read_capped
from shoal.net.urls import addresses_of, demand_port, outside_address, port_of
from shoal.protocol.messages import RunInfo
from shoal.weights.fetch.scheduler import LAST, MOST_LANES

CONNECT_TIMEOUT_S = 10.0

SMALL_S = 10.0
"""A small answer may take so long."""

NEVER_S = 600.0
"""Longest silence within an answer that this file itself allows: `transfer` has a shorter limit."""


class Passing(PeerError):
    """A source failed in a way that may pass: it is asked again later."""

    def __init__(self, reason: str, retry_s: float = 0.0, is_host_away: bool = False) -> None:
        """`retry_s`: the source asked us to wait so long."""
        super().__init__(reason)
        self.retry_s, self.is_host_away = retry_s, is_host_away


class HostAway(PeerError):
    """Chunks could not be fetched, and the run's host is down or another program answers in its place."""


class _Answered(RetryableError):
    """The source itself said that a request may succeed later."""


class WrongBytes(PeerError):
    """What a source sent cannot be the chunk."""


class ChunkSource(Protocol):
    """A source of chunks."""

    name: str
    """For blame: a URL."""
    rank: int
    """Sources of a higher rank are spared as long as those of lower ranks are as fast."""

    def parts(self, digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        """The bytes of a chunk of `size` bytes from `start` on, as they come, unverified. An empty part says that the
        source is alive.

        Raises `Passing` if the source should be asked again later, `WrongBytes` if it lied, and any other `PeerError` if it
        should not be asked again in this fetch.
        """
        ...

    async def close(self) -> None:
        """Let go of connections. A later call opens them again."""
        ...


class FillingSource(ChunkSource, Protocol):
    """A source that may lack chunks and says which it has."""

    async def holds(self) -> Collection[str] | None:
        """The chunks that it has now of the versions that are expected; None means all. Raises `PeerError`."""
        ...

    def expect(self, versions: Mapping[str, Sequence[str]]) -> None:
        """From now on, it is asked for chunks of these versions: the chunks of each by its content."""
        ...


def is_filling(source: ChunkSource) -> TypeGuard[FillingSource]:
    """Whether a source is a `FillingSource`."""
    return hasattr(source, "holds")


class SourceAddress(NamedTuple):
    """How the address of a source is found, and which may be asked. By default a stranger gave it."""

    is_trusted: bool = False
    """The user gave it, so it may be inside."""
    beside: bool = False
    """A stranger who is inside gave it, so it may be, too."""
    known: str = ""
    """Ask this one, and do not look up the name; it is judged alike."""
    by_name: bool = False
    """As `Client.goes_by_name`."""


STRANGERS, TRUSTED = SourceAddress(), SourceAddress(is_trusted=True)


class HttpSource:
    """Files named by their hash, below a URL."""

    def __init__(
        self,
        url: str,
        address: SourceAddress = STRANGERS,
        *,
        name: str = "",
        rank: int = 0,
        still_filling: bool = False,
        is_host: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`is_host`: the server is the run's host, so what answers without its header is another program.
        `still_filling`: a chunk that it lacks may come later, as with a relay. Raises `PeerError` for a bad URL.
        """
        try:
            self._url = httpx.URL(url.rstrip("/"))
            self._url.host.encode("idna")  # refuses parts that are empty or too long  # guard: names-of-sources
        except (httpx.InvalidURL, UnicodeError) as error:
            raise PeerError(f"{url!r} is not a URL ({error})") from None
        parts = self._url
        if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo or parts.query or parts.fragment:
            raise PeerError(f"{url!r} is not a source's URL: it must be http(s)://HOST/PATH")
        if not address.is_trusted:
            demand_port(parts.port)  # guard: ports-of-sources
        self.name, self.rank = name or url, rank
        self._filling, self._transport, self._is_host = still_filling, transport, is_host
        self._http: httpx.AsyncClient | None = None
        self._found, self._address = address, ""
        self.was_asked = self.was_heard = False

    async def parts(self, digest: str, start: int, size: int) -> AsyncGenerator[bytes, None]:
        """See `Source`."""
        headers = {"range": f"bytes={start}-{size - 1}"} if start else {}
        self.was_asked = True
        try:
            with map_http_errors(self.name, NEVER_S, lambda: True):
                request = await self._request(self._path(digest), headers)
                try:
                    response = await self._opened().send(request, stream=True)
                except _CLOSED:  # perhaps while nothing was asked: a new connection shows it
                    response = await self._opened().send(request, stream=True)
                self.was_heard = True
                try:
                    skip = self._skipped(response, start, size)
                    async for data in raw_parts(response):
                        yield data[skip:]
                        skip = max(0, skip - len(data))
                finally:
                    await response.aclose()
        except RetryableError as trouble:
            self._address = ""  # look the name up again: the server may have moved
            is_away = self._is_host and not isinstance(trouble, _Answered)
            raise Passing(str(trouble), trouble.retry_s, is_away) from None

    async def close(self) -> None:
        """See `Source`."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def _opened(self) -> httpx.AsyncClient:
        if self._http is None:
            limits = httpx.Limits(max_keepalive_connections=MOST_LANES, keepalive_expiry=60.0)
            self._http = httpx.AsyncClient(
                transport=self._transport
                or HardenedTransport(
                    verify=self._url.scheme == "https", limits=limits, proxy=proxy_for(self._url.scheme, self._url.host)
                ),
                trust_env=False,
                timeout=httpx.Timeout(NEVER_S, connect=CONNECT_TIMEOUT_S),
                headers={"accept-encoding": "identity", "user-agent": USER_AGENT},
            )
            self._http.follow_redirects = False  # guard: sources-do-not-redirect
        return self._http

    async def small(self, path: str, cap: int) -> bytes:
        """At most `cap` bytes of a path that is relative to that of the chunks. Raises as `parts`."""
        try:
            with map_http_errors(self.name, SMALL_S, lambda: True):
                async with asyncio.timeout(SMALL_S):
                    response = await self._opened().send(await self._request(self._path(path), {}), stream=True)
                    try:
                        return await self._read_small(response, cap)
                    finally:
                        await response.aclose()
        except RetryableError as trouble:
            self._address = ""
            raise Passing(str(trouble), trouble.retry_s) from None

    async def _read_small(self, response: httpx.Response, cap: int) -> bytes:
        if response.status_code in (404, 410):
            raise NothingYet(f"has nothing at {response.url.path[:80]}")
        if response.status_code != 200:
            raise RetryableError(f"HTTP {response.status_code}", retry_after(response))
        data = await read_capped(response, cap)
        if data is None:  # guard: small-answers
            raise RetryableError(f"answered more than {cap} bytes at {response.url.path[:80]}")
        return data

    def _path(self, below: str) -> str:
        above = self._url.path.rstrip("/")
        while below.startswith("../"):
            above, below = above.rpartition("/")[0], below[3:]
        return f"{above}/{below}"

    async def _request(self, path: str, headers: dict[str, str]) -> httpx.Request:
        """A request: to an address that was judged, if a stranger gave the URL."""
        url = self._url.copy_with(path=path)
        if self._found.is_trusted:
            return self._opened().build_request("GET", url, headers=headers)
        if not self._address:
            try:
                judged = self._judged_address(self._found.known or url.host, port_of(url))
                self._address = await asyncio.wait_for(judged, CONNECT_TIMEOUT_S)
            except TimeoutError:
                raise RetryableError(f"the address of {url.host} was not found in {CONNECT_TIMEOUT_S:.0f} s") from None
            except (OSError, UnicodeError):
                if self._found.by_name:
                    return self._opened().build_request("GET", url, headers=headers)
                raise RetryableError(f"the address of {url.host} was not found") from None
        return self._opened().build_request(
            "GET",
            url.copy_with(host=self._address),
            headers={"host": url.netloc.decode("ascii"), **headers},
            extensions={"sni_hostname": url.host},
        )

    async def _judged_address(self, host: str, port: int) -> str:
        """An address of a stranger's host that may be asked. Raises `PeerError`, and OSError."""
        if self._found.beside:  # guard: inside-beside-inside
            return (await addresses_of(host, port))[0]
        return await outside_address(host, port)

    def _skipped(self, response: httpx.Response, start: int, size: int) -> int:
        """How many bytes of an answer come before `start`. Raises `RetryableError` or `PeerError` if it is not the
        chunk."""
        status = response.status_code
        if self._is_host and SHOAL not in response.headers:  # guard: strangers-serve-no-chunks
            raise RetryableError(another_program(status), retry_after(response))
        if response.is_redirect:
            raise PeerError(f"redirects to {location_of(response)[:200]}: no redirect is followed")
        if status in (404, 410):
            if self._filling:
                raise _Answered("does not have the chunk yet")
            raise NothingYet("does not have a chunk: it was never stored, or has expired")
        if status in (408, 425, 429) or status >= 500:
            raise _Answered(f"HTTP {status}", retry_after(response))
        if status not in (200, 206):
            raise PeerError(f"answered HTTP {status}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise PeerError(f"sends chunks with content-encoding {response.headers['content-encoding'][:20]!r}")
        first = start if status == 206 else 0
        if status == 206 and not _is_range(response.headers.get("content-range", ""), start, size):
            raise WrongBytes(
                f"answered bytes {start}-{size - 1} with {response.headers.get('content-range', '')[:40]!r}"
            )
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) != size - first:  # guard: length-of-a-chunk
            raise WrongBytes(f"declares {declared[:20]} bytes where the chunk has {size - first}")
        return start - first


_CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15}|\*)", re.ASCII)


def _is_range(text: str, start: int, size: int) -> bool:
    found = _RANGE.fullmatch(text)
    return found is not None and int(found[1]) == start and int(found[2]) == size - 1


ORIGIN, COORDINATOR = 1, LAST
"""Ranks: what many share is spared as long as others serve."""


def sources_of(
    info: RunInfo, client: Client, others: Sequence[ChunkSource] = (), *, spare_origin: bool = True
) -> list[ChunkSource]:
    """Where the weights of a run come from: `others`, such as relays; its origin; and the coordinator that `client` calls.

    The origin is spared while others serve, unless `spare_origin` is false, as for a relay: somebody must have the chunks
    first. The coordinator is asked only if the origin is not there, or not to be reached from here.
    """
    origin = list[ChunkSource]()
    with contextlib.suppress(PeerError):  # the coordinator serves chunks, too
        origin += _origin(info.origin, client, ORIGIN if spare_origin else 0)
    rank = COORDINATOR if spare_origin or origin else 0
    coordinator = HttpSource(
        f"{client.base_url}/v1/blobs",
        SourceAddress(is_trusted=client.may_be_inside, known=client.address, by_name=client.goes_by_name),
        name=client.base_url,
        rank=rank,
        transport=client.transport,
        is_host=True,
    )
    return [*others, *origin, coordinator]


_PORT = re.compile(r":(\d{1,5})(/[A-Za-z0-9._/-]{0,200})", re.ASCII)


def _origin(said: str, client: Client, rank: int) -> list[ChunkSource]:
    """The origin that a coordinator named. Raises `PeerError` for a bad URL."""
    called = httpx.URL(client.base_url)
    if beside := _PORT.fullmatch(said):
        demand_port(int(beside[1]))  # guard: port-beside-the-coordinator
        if called.scheme != "http":
            return []  # a proxy is in front, which the origin's port does not have
        url = str(called.copy_with(port=int(beside[1]), raw_path=beside[2].encode()))
        return [HttpSource(url, SourceAddress(is_trusted=client.may_be_inside, known=client.address), rank=rank)]
    return [HttpSource(said, SourceAddress(beside=client.may_be_inside), rank=rank)] if said else []

"""Servers whose answers do not begin, or have headers that httpx acts on, and honest ones, over real sockets."""

import asyncio
import contextlib
import time

import httpx
import pytest

from shoal.errors import PeerError
from shoal.net import safe_http
from shoal.net.client import Client
from shoal.net.safe_http import MOST_HEAD_BYTES, HardenedTransport
from shoal.weights.fetch.sources import TRUSTED, HttpSource, Passing
from tests.weights.web import head, web_server

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


async def endless(path, headers, writer):
    for _ in range(200):
        writer.write(INTERIM * 2000)
        await writer.drain()


async def wordy(path, headers, writer):
    writer.write(head(200, Content_Length=3, X_Long="x" * 60_000) + b"abc")


async def honest(path, headers, writer):
    writer.write(INTERIM * 10 + head(200, Content_Length=1_000_000, X_Long="x" * 8000) + b"y" * 1_000_000)


@pytest.mark.parametrize("answer", [endless, wordy])
def test_an_answer_that_does_not_begin_is_left_after_few_bytes(answer):
    async def scenario() -> float:
        async with web_server(answer) as url:
            source, before = HttpSource(url, TRUSTED), time.process_time()
            with pytest.raises(Passing, match=f"sent {MOST_HEAD_BYTES} bytes and no answer"):
                async for _ in source.parts("a" * 64, 0, 1000):
                    pass
            await source.close()
            with pytest.raises(PeerError, match="and no answer"):
                await safe_http.get(httpx.URL(f"{url}/x"), cap=100, deadline_s=10, address="127.0.0.1")
            return time.process_time() - before

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) < 2


@pytest.mark.parametrize(
    "headers",
    [{"location": "javascript:1"}, {"location": "http://xn--a/"}, {"location": "http://[::1"},
     {"set-cookie": b"a=\xff\xfe"}, {"set-cookie": "a=b; Path=/"}],
)  # fmt: skip
@pytest.mark.parametrize("status", [200, 302])
def test_no_header_of_an_answer_does_anything_in_httpx(headers, status):
    """An error of its own ended whole fetches, and the coordinator's task for relays. Cookies were sent back."""
    asked = []

    async def answer(path, said, writer):
        asked.append(said)
        ((name, value),) = headers.items()
        value = value if isinstance(value, bytes) else value.encode()
        writer.write(head(status, Content_Length=0)[:-2] + f"{name}: ".encode() + value + b"\r\n\r\n")

    async def scenario() -> None:
        async with web_server(answer) as url:
            source = HttpSource(url, TRUSTED)
            for _ in range(3):
                with pytest.raises(PeerError):
                    async for _ in source.parts("a" * 64, 0, 1000):
                        pass
                with pytest.raises(PeerError):
                    await source.small("x", 0)
                    raise PeerError("an empty answer")
            await source.close()
            with contextlib.suppress(PeerError):
                await safe_http.get(httpx.URL(f"{url}/x"), cap=100, deadline_s=10, address="127.0.0.1")
            async with Client(url) as client:
                with pytest.raises(PeerError):
                    await client.get("/v1/run", cap=100, deadline_s=0.1)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(asked) >= 7 and not any("cookie" in said for said in asked)


def test_a_connection_is_used_again_for_long_answers():
    asked = []

    async def counted(path, headers, writer):
        asked.append(id(writer))
        await honest(path, headers, writer)

    async def scenario() -> None:
        transport = HardenedTransport(verify=False)
        async with web_server(counted) as url, httpx.AsyncClient(transport=transport, trust_env=False) as http:
            for _ in range(3):
                assert (await http.get(url)).content == b"y" * 1_000_000

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(asked) == 3 and len(set(asked)) == 1


@pytest.mark.parametrize("tunnels", [True, False])
def test_a_407_through_a_tunnel_is_the_servers(tunnels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        return httpx.Response(407)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
    transport = HardenedTransport(verify=tunnels, proxy=httpx.URL("http://proxy.test:3128"))
    asked = transport.handle_async_request(httpx.Request("GET", "https://host.test/"))
    if tunnels:
        assert asyncio.run(asked).status_code == 407
    else:
        with pytest.raises(PeerError, match="wants a user"):
            asyncio.run(asked)

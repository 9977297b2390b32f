"""Answers in very small parts: they are refused while few are read, and slow lines and large parts pass."""

import asyncio
import time

import httpx
import pytest

from shoal.errors import PeerError
from shoal.net import safe_http
from shoal.net.client import Client
from shoal.net.retryable_errors import RetryableError
from shoal.net.safe_http import FEW_PARTS, LEAST_BYTES, PARTS_PER_S, raw_parts
from tests.weights.web import Answer, head, web_server

CHUNKED = head(200, Transfer_Encoding="chunked")


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def saying(data: bytes) -> Answer:
    async def answer(path, headers, writer):
        writer.write(data)

    return answer


def parts_read(parts: list[bytes], gap_s: float = 0.0) -> list[bytes]:
    """What is read of an answer whose parts come so far apart. Raises `RetryableError`."""
    at = iter(range(1 << 30))

    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):
            for part in parts:
                yield part

    async def scenario() -> list[bytes]:
        return [one async for one in raw_parts(httpx.Response(200, stream=Body()), lambda: next(at) * gap_s)]

    return asyncio.run(scenario())


def test_small_parts_that_come_fast_are_refused():
    with pytest.raises(RetryableError, match="in parts of 1 bytes"):
        parts_read([b"x"] * 1000)
    with pytest.raises(RetryableError, match="in parts of 16 bytes"):
        parts_read([b"x" * 1000, *[b"x"] * 1000])


@pytest.mark.parametrize(
    ("parts", "gap_s"),
    [([b"x"] * FEW_PARTS, 0.0), ([b"x"] * 1000, 1 / PARTS_PER_S), ([b"x" * LEAST_BYTES] * 1000, 0.0),
     ([b"x" * 1400, b"y"] * 1000, 0.0), ([b"x" * 65536] * 100, 0.0)],
)  # fmt: skip
def test_few_parts_and_large_ones_and_those_of_a_slow_line_pass(parts, gap_s):
    assert parts_read(parts, gap_s) == parts


def test_an_answer_in_small_parts_costs_no_time():
    """As a coordinator reads a probe: before, each of 60,000 parts of one byte was copied with all before it."""
    data = CHUNKED + chunked(b"x" * (4 << 20), *[b"y"] * 60_000)

    async def scenario() -> float:
        async with web_server(saying(data)) as url:
            before = time.process_time()
            with pytest.raises(PeerError, match="in parts of"):
                await safe_http.get(httpx.URL(url), cap=5 << 20, deadline_s=10, address="127.0.0.1")
            return time.process_time() - before

    assert asyncio.run(scenario()) < 2


def test_a_host_cannot_keep_its_nodes_busy_with_small_parts():
    """A node reads whatever its host answers: a body of 60,000 parts is left after the first few."""
    ours = head(200, Transfer_Encoding="chunked", Shoal_Protocol="1")
    data = ours + chunked(*[b" "] * 60_000)

    async def scenario() -> float:
        async with web_server(saying(data)) as url, Client(url) as client:
            before = time.process_time()
            with pytest.raises(PeerError, match="in parts of 1 bytes"):
                await client.get("/v1/run", deadline_s=2.0)
            return time.process_time() - before

    assert asyncio.run(scenario()) < 1

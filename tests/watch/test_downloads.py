"""Downloads of strangers: who reads too slowly, or for too long while others wait, loses its place, over real sockets."""

import asyncio
import contextlib

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from shoal.watch.page import downloads
from shoal.watch.page.downloads import TURN_S, Download, Places

ASK = b"GET /table.csv HTTP/1.1\r\nhost: page\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(lines, places):
    """A port at which each request gets the lines."""
    route = Route("/table.csv", lambda request: Download(lines(), places, {}))
    config = uvicorn.Config(Starlette(routes=[route]), port=0, log_level="critical")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await running


async def asked(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK)
    status = await reader.readline()
    return int(status.split()[1]), reader, writer


def endless():
    while True:
        yield "a line of a table that never ends\n" * 1000


def test_a_reader_that_takes_nothing_loses_its_place(monkeypatch, caplog):
    monkeypatch.setattr(downloads, "MOST_DOWNLOADS", 1)
    monkeypatch.setattr(downloads, "STALLED_S", 0.3)

    async def story():
        async with serving(endless, Places()) as port:
            (first, _, stalled), (busy, reader, other) = await asked(port), await asked(port)
            told = (await reader.read(1000)).decode()
            while (later := (await asked(port))[0]) != 200:
                await asyncio.sleep(0.1)
            stalled.transport.abort(), other.close()
            return first, busy, told, later

    with caplog.at_level("INFO"):
        first, busy, told, later = asyncio.run(asyncio.wait_for(story(), 60))
    assert (first, busy, later) == (200, 503, 200) and "try again in" in told and "retry-after: " in told
    assert "took nothing for 0.3 seconds" in caplog.text


def test_a_slow_reader_that_goes_on_reading_gets_the_whole_table(monkeypatch):
    monkeypatch.setattr(downloads, "STALLED_S", 1.0)
    line = "x" * 999 + "\n"

    async def story():
        async with serving(lambda: (line for _ in range(12_000)), Places()) as port:
            _, reader, writer = await asked(port)
            size, begun = 0, asyncio.get_running_loop().time()
            while part := await reader.read(1 << 18):
                size += len(part)
                await asyncio.sleep(0.05)
                if part.endswith(b"0\r\n\r\n"):
                    break
            writer.close()
            return size, asyncio.get_running_loop().time() - begun

    size, took_s = asyncio.run(asyncio.wait_for(story(), 60))
    assert size > 12_000_000 and took_s > 2.0


def test_a_download_that_had_its_turn_ends_when_another_is_turned_away(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(downloads, "MOST_DOWNLOADS", 1)

    async def story():
        async with serving(endless, Places(lambda: now[0])) as port:
            _, reader, writer = await asked(port)
            now[0] = TURN_S + 1
            assert len(await reader.readexactly(10_000_000)) == 10_000_000, "nobody else has asked"
            assert (await asked(port))[0] == 503
            with pytest.raises(asyncio.IncompleteReadError):
                await reader.readexactly(1 << 40)
            writer.close()
            return (await asked(port))[0]

    assert asyncio.run(asyncio.wait_for(story(), 60)) == 200


def test_nobody_loses_its_place_within_its_turn(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(downloads, "MOST_DOWNLOADS", 2)
    places = Places(lambda: now[0])
    assert places.take("a") and not places.is_over("a")
    now[0] = 30.0
    assert places.take("b") and not places.take("c") and places.wait_s() == 30 + 20
    assert not places.is_over("a"), "its turn is not over"
    now[0] = TURN_S + 1
    assert not places.take("c") and places.is_over("a") and not places.is_over("b")
    places.give_back("a")
    assert places.take("c") and not places.is_over("b"), "the one that was turned away has a place"

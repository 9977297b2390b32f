"""Downloads of strangers over real sockets: few at a time, each for its turn; and what stalls ends."""

import asyncio
import contextlib
import time
from dataclasses import dataclass

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shoal.net.connection_limits import ServerLimits
from shoal.views.web import csv_export
from shoal.views.web.csv_export import Download, Places
from tests.net.wires import request, run, serving

ASK = request("GET", "/table.csv")
LINE = "x" * 999 + "\n"


@dataclass
class Reader:
    """One who asked for the table."""

    status: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def takes(self, size):
        """Read so many bytes."""
        assert len(await self.reader.readexactly(size)) == size

    async def is_cut_off(self):
        """Read until the connection ends; whether the file was not whole."""
        end = b""
        with contextlib.suppress(ConnectionError):
            while not end.endswith(b"\n0\r\n\r\n") and (part := await self.reader.read(1 << 16)):
                end = (end + part)[-6:]
        return not end.endswith(b"\n0\r\n\r\n")


async def asked(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK)
    return Reader(int((await reader.readline()).split()[1]), reader, writer)


async def asked_again(port):
    """Ask until there is a place."""
    while (found := await asked(port)).status != 200:
        found.writer.close()
        await asyncio.sleep(0.05)
    return found


@contextlib.asynccontextmanager
async def table(num_lines=1 << 30, **limits):
    """The port of a server of a table, which is endless as it is used here."""
    places = Places()
    route = Route("/table.csv", lambda _: Download((LINE for _ in range(num_lines)), places, {}))
    async with serving(Starlette(routes=[route]), ServerLimits(**limits)) as port:
        yield port


@pytest.fixture(autouse=True)
def one_place(monkeypatch):
    monkeypatch.setattr(csv_export, "MOST_DOWNLOADS", 1)


def test_who_is_turned_away_shortens_the_oldest_download_to_its_turn(monkeypatch, caplog):
    monkeypatch.setattr(csv_export, "TURN_S", 0.5)

    async def scenario():
        async with table() as port:
            first = await asked(port)
            await asyncio.sleep(0.6)
            await first.takes(10_000_000)  # after its turn, because nobody else has asked
            turned_away = await asked(port)
            assert turned_away.status == 503 and await first.is_cut_off()
            second, begun = await asked(port), asyncio.get_running_loop().time()
            assert second.status == 200 and (await asked(port)).status == 503
            reading = asyncio.create_task(second.is_cut_off())
            await asked_again(port)
            assert 0.4 < asyncio.get_running_loop().time() - begun < 5.0, "refused within its turn, it has the turn"
            assert await reading

    run(scenario())
    assert "took too long" in caplog.text


def test_who_is_turned_away_is_told_when_there_is_a_place(monkeypatch):
    monkeypatch.setattr(csv_export, "TURN_S", 1.1)

    async def scenario():
        async with table() as port:
            stalled, turned_away = await asked(port), await asked(port)
            head = (await turned_away.reader.readuntil(b"\r\n\r\n")).decode()
            assert (stalled.status, turned_away.status) == (200, 503) and "retry-after: 2\r\n" in head
            await asyncio.sleep(1.3)
            assert (await asked(port)).status == 200
            assert await stalled.is_cut_off()

    run(scenario())


def test_no_download_lasts_for_ever(monkeypatch):
    monkeypatch.setattr(csv_export, "MOST_S", 0.2)

    async def scenario():
        async with table() as port:
            assert await (await asked(port)).is_cut_off()

    run(scenario())


def test_a_download_without_a_first_line_in_time_is_told_so(monkeypatch):
    monkeypatch.setattr(csv_export, "MOST_S", 0.2)

    def slow():
        time.sleep(0.5)
        yield LINE

    async def scenario():
        route = Route("/table.csv", lambda _: Download(slow(), Places(), {}))
        async with serving(Starlette(routes=[route]), ServerLimits()) as port:
            assert (await asked(port)).status == 503

    run(scenario())


def test_a_reader_that_takes_nothing_loses_place_and_connection():
    async def scenario():
        async with table(stall_s=0.3) as port:
            stalled = await asked(port)
            assert (await asked(port)).status == 503
            await asked_again(port)
            assert await stalled.is_cut_off()

    run(scenario())


def test_a_reader_that_is_slow_gets_the_whole_table():
    async def scenario():
        async with table(20_000, stall_s=0.6) as port:
            slow, begun = await asked(port), asyncio.get_running_loop().time()
            for _ in range(8):
                await slow.takes(2_000_000)
                await asyncio.sleep(0.2)
            assert asyncio.get_running_loop().time() - begun > 1.5
            assert not await slow.is_cut_off()

    run(scenario())


def test_a_reader_that_leaves_gives_its_place_back():
    async def scenario():
        async with table() as port:
            left = await asked(port)
            assert (await asked(port)).status == 503
            left.writer.close()
            assert (await asked_again(port)).status == 200

    run(scenario())

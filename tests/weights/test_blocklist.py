"""A source that lied is left out of the next fetches too, for longer each time, and never so that none is left."""

import asyncio
import dataclasses

import pytest

from shoal.net.connection_limits import ServerLimits
from shoal.protocol.messages import RelayEntry
from shoal.weights.fetch.fetch import fetch
from shoal.weights.fetch.relay_sources import (
    FORGET_S,
    LIAR_S,
    LONGEST_S,
    MOST_SOURCES,
    UNREACHED_S,
    Relays,
    SourceBlocklist,
)
from shoal.weights.fetch.transfer import TransferEvents
from shoal.weights.fetch.version_directory import VersionFolder
from tests.net.wires import serving
from tests.weights.checkpoints import Chunks, Lying, make_checkpoint, published


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def left(clock) -> SourceBlocklist:
    return SourceBlocklist(clock)


def test_one_wrong_chunk_may_be_an_accident_and_two_are_not(left, clock):
    left.lied("relay")
    assert "relay" not in left
    clock.now += FORGET_S + 1
    left.lied("relay")
    assert "relay" not in left, "the first was forgotten"
    left.lied("relay")
    assert "relay" in left and "other" not in left


def test_a_source_that_lies_again_is_left_out_for_twice_as_long(left, clock):
    left.lied("relay")
    for times in range(12):
        left.lied("relay")
        left.lied("relay")  # was under way, and changes nothing
        out_s = min(LIAR_S * 2**times, LONGEST_S)
        clock.now += out_s - 1
        assert "relay" in left
        clock.now += 2
        assert "relay" not in left
    clock.now += FORGET_S
    left.lied("relay")
    assert "relay" not in left, "it was good for a day"


def test_who_was_not_reached_is_asked_again_soon_and_who_lied_is_not(left, clock):
    left.unreached("silent")
    left.lied("liar")
    left.lied("liar")
    left.reached("liar")
    clock.now += UNREACHED_S + 1
    assert "silent" not in left and "liar" in left


def test_few_are_remembered_and_those_that_are_out_longest_last(left):
    left.lied("liar")
    left.lied("liar")
    for number in range(2 * MOST_SOURCES):
        left.unreached(f"silent-{number}")
    assert len(left._known) == MOST_SOURCES and "liar" in left


def test_a_relay_that_lies_to_clients_costs_them_few_chunks_and_not_some_of_each_version(clock, tmp_path):
    """The coordinator probes it from another address, and gets right bytes."""
    asked = []

    async def lying(scope, receive, send):
        await receive()
        is_chunk = "/blobs/" in scope["path"]
        if is_chunk:
            asked.append(scope["path"])
        body = b"\0" * 1000 if is_chunk else b""
        await send({"type": "http.response.start", "status": 200 if is_chunk else 404, "headers": []})
        await send({"type": "http.response.body", "body": body})

    @dataclasses.dataclass
    class Host:
        url: str
        base_url: str = "http://127.0.0.1:1"
        may_be_inside: bool = True

        async def get_json(self, path, kind, deadline_s):
            return [RelayEntry(self.url, "127.0.0.1", "key")]

    async def follow(relays, version: int) -> int:
        asked.clear()
        origin = Chunks()
        directory = await asyncio.to_thread(make_checkpoint, tmp_path / f"checkpoint-{version}", version)
        manifest = await asyncio.to_thread(published, directory, origin, version)
        origin.rank = 1
        sources = relays.usable([*await relays.sources(), origin])
        assert sources[-1] is origin
        await fetch(manifest, sources, VersionFolder(tmp_path / "cache"), events=TransferEvents(on_lie=relays.lied))
        return len(asked)

    async def scenario():
        async with serving(lying, ServerLimits()) as port:
            relays = Relays(Host(f"http://127.0.0.1:{port}"), clock=clock)
            asked_of = [await follow(relays, version) for version in range(4)]
            assert sum(asked_of) == 2 and asked_of[2:] == [0, 0]
            clock.now += LIAR_S + 1
            assert 0 < await follow(relays, 4) <= 2
            clock.now += 2 * LIAR_S - 1
            assert await follow(relays, 5) == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_last_source_stays_even_if_it_lied(clock, tmp_path):
    relays, liar = Relays(None, clock=clock), Lying("http://coordinator")
    relays.lied(liar.name)
    relays.lied(liar.name)
    assert relays.usable([liar]) == [liar]
    assert relays.usable([liar, Chunks("http://other")])[0].name == "http://other"

"""Sources that are still filling: they are asked for what they have, rare chunks first, and one that lies is left."""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from shoal.errors import PeerError
from shoal.weights.fetch import scheduler
from shoal.weights.fetch.relay_sources import held_chunks, holdings_of
from shoal.weights.fetch.sources import Passing, is_filling
from tests.weights.simulated import Link, Server, Version, now

KB = 1000
CHUNK = 16 << 10


@dataclass
class Relay(Server):
    """A source that fills in the course of time."""

    per_s: float = 0.0
    """Chunks that it gets a second."""
    order: list[str] = field(default_factory=list)
    first: int = 0
    says: str = "truth"
    questions: list[float] = field(default_factory=list)
    """When it was asked what it has."""

    def has_now(self) -> list[str]:
        return self.order[: self.first + int(now() * self.per_s)]

    async def holds(self):
        self.questions.append(now())
        if self.says == "nothing at all":
            raise Passing("does not answer")
        return {"truth": frozenset(self.has_now()), "everything": None, "nothing": frozenset()}[self.says]

    def expect(self, versions):
        pass

    async def parts(self, digest, start, size):
        if digest not in self.has_now():
            self.asked.append((now(), digest, -1))
            raise Passing("does not have the chunk yet")
        async for part in super().parts(digest, start, size):
            yield part


@pytest.fixture
def version(tmp_path) -> Version:
    return Version(tmp_path / "v", 200, CHUNK)


def relay(name: str, version: Version, rate: float = 400 * KB, **options) -> Relay:
    return Relay(name, version.held, Link(rate), order=list(version.held), **options)


def missed(source: Server) -> int:
    return sum(start < 0 for _, _, start in source.asked)


def test_bits_say_what_is_held():
    chunks = [f"{i:064x}" for i in range(19)]
    for held in ([], chunks[:1], chunks[3:17:2], chunks):
        bits = holdings_of(chunks, held)
        assert len(bits) == 3 and held_chunks(bits, chunks) == frozenset(held)
    assert held_chunks(b"", chunks) == frozenset() and held_chunks(b"\xff" * 9, chunks) == frozenset(chunks)


def test_a_relay_that_fills_is_asked_only_for_what_it_has(version):
    filling = relay("filling", version, 2000 * KB, per_s=20.0)
    origin = Server("origin", version.held, Link(2000 * KB), rank=1)
    assert is_filling(filling) and not is_filling(origin)
    assert version.fetch([filling, origin]).is_right
    assert missed(filling) == 0 and version.blamed == [] and origin.sent == 0
    assert version.took_s < 200 / 20 + 3


def test_rare_chunks_are_asked_for_first(version):
    """Two relays have the same half: the origin gives the other half, which only it has."""
    relays = [relay(name, version, first=100) for name in "ab"]
    origin = Server("origin", version.held, Link(800 * KB))
    assert version.fetch([*relays, origin]).is_right and version.blamed == []
    common = {digest for _, digest, _ in origin.asked} & set(list(version.held)[:100])
    assert len(common) < 20 and version.took_s < 1.35 * version.size / (1600 * KB)


def test_a_relay_with_nothing_holds_up_nobody(version):
    empty = relay("empty", version)
    origin = Server("origin", version.held, Link(400 * KB), rank=1)
    assert version.fetch([empty, origin]).is_right
    assert version.took_s < version.size / (400 * KB) * 1.05 + 0.7 and empty.asked == []


def test_a_relay_that_has_given_all_that_it_has_holds_up_nobody(version):
    """Such as one with little disk, or a worker that shares another version."""
    part = relay("part", version, 4000 * KB, first=100)
    origin = Server("origin", version.held, Link(400 * KB), rank=1)
    assert version.fetch([part, origin]).is_right
    assert version.took_s < version.size / 2 / (400 * KB) * 1.05 + 3 and part.sent > 0.45 * version.size


def test_while_a_relay_fills_the_origin_is_spared(version):
    """However often it has nothing that waits. Its line is faster than what fills it."""
    filling = relay("filling", version, 8000 * KB, per_s=5.0)
    origin = Server("origin", version.held, Link(8000 * KB), rank=1)
    assert version.fetch([filling, origin]).is_right
    assert origin.sent == 0 and version.took_s > 200 / 5


def test_a_relay_with_much_to_give_is_seldom_asked_what_it_has(version):
    """Until it has little left to give."""
    filling = relay("filling", version, 50 * KB, first=190, per_s=0.01)
    assert version.fetch([filling, relay("other", version, 50 * KB, first=200)]).is_right
    pauses = [after - before for before, after in itertools.pairwise(filling.questions)]
    assert version.took_s > 30 and min(pauses[2:5]) >= 4 and 1 <= pauses[-1] < 2


def test_a_relay_that_says_nothing_holds_up_nobody(version):
    silent = relay("silent", version)
    silent.holds = asyncio.Event().wait
    origin = Server("origin", version.held, Link(400 * KB), rank=1)
    assert version.fetch([silent, origin]).is_right
    assert version.took_s < version.size / (400 * KB) * 1.05 + 0.7


def test_two_relays_that_wait_for_each_other_ask_the_coordinator(version):
    """A relay fills from the origin first. Here it is gone, and the other relay has nothing either."""
    gone = Server("origin", version.held, Link(400 * KB), is_up=lambda time: False)
    other = relay("other relay", version)
    other.rank = 1
    coordinator = Server("coordinator", version.held, Link(400 * KB), rank=scheduler.LAST)
    assert version.fetch([other, gone, coordinator]).is_right
    assert version.took_s < version.size / (400 * KB) * 1.05 + 10


def test_a_relay_with_a_slow_origin_beside_an_empty_relay_spares_the_coordinator(version):
    """Relays of a new version all begin empty, and share the origin's line."""
    origin = Server("origin", version.held, Link(60 * KB))
    other = relay("other relay", version)
    other.rank = 1
    coordinator = Server("coordinator", version.held, Link(8000 * KB), rank=scheduler.LAST)
    assert version.fetch([other, origin, coordinator]).is_right
    assert coordinator.sent == 0


def test_a_relay_that_says_too_much_or_nothing_is_left_alone(version):
    liar = relay("liar", version, says="everything")
    mute = relay("mute", version, says="nothing at all")
    origin = Server("origin", version.held, Link(400 * KB), rank=1)
    assert version.fetch([liar, mute, origin]).is_right
    assert version.took_s < version.size / (400 * KB) * 1.2 + 6 and missed(liar) < 12
    assert {name for name, _ in version.blamed} == {"liar", "mute"}


def test_a_fetch_ends_if_nobody_has_the_chunks(version):
    with pytest.raises(PeerError, match="200 of the chunks not fetched"):
        version.fetch([relay("empty", version)])
    assert 55 < version.took_s < 70


def test_a_chunk_that_a_relay_lost_comes_from_another(version):
    """It is asked for again of those that have it, also if they had nothing else to give."""
    forgets = relay("forgets", version, first=200)
    forgets.has_now = lambda: forgets.order[:200] if now() < 2 else forgets.order[:20]
    sound = relay("sound", version, first=200)
    assert version.fetch([forgets, sound]).is_right
    assert version.took_s < 1.3 * version.size / (400 * KB)

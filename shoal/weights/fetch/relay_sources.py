"""A relay as a source of chunks: like any other, but it may still be filling, and says which chunks it has.

Its answer is a bit for each of a version's chunks, in the order in which the manifest names them first. A fetch by patches
needs chunks of several versions, so a relay is asked about each of them.

Relays are strangers. The coordinator checked that the holder of the key serves at the URL, and at which address. That
address is asked.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.protocol.messages import Manifest
from shoal.protocol.messages.batches import RelayEntry
from shoal.weights.fetch.blocklist import SourceBlocklist
from shoal.weights.fetch.chunks import sized_chunks
from shoal.weights.fetch.sources import ChunkSource, HttpSource
from shoal.weights.manifest import content_of

LIST_EVERY_S = 60.0
"""Time between two questions for the list of relays."""

LIST_S = 5.0
"""The list is waited for no longer."""

FEW = 4
"""So many relays, or fewer, take what they can from the origin: their own lines are for clients. More of them, or workers
that share, take rare chunks from the origin and the others from each other, so that it sends little more than one copy."""

MOST_RELAYS = 20
"""Relays that a client asks."""


class RelaySource(HttpSource):
    """A relay. It must be told which versions are expected."""

    def __init__(self, relay: RelayEntry, *, beside: bool = False) -> None:
        """`beside` is as of `HttpSource`. Raises `PeerError` for a bad URL."""
        url = relay.url.rstrip("/")
        super().__init__(f"{url}/v1/blobs", name=url, beside=beside, still_filling=True, address=relay.address)
        self._versions: Mapping[str, Sequence[str]] = {}
        self._held: dict[str, frozenset[str]] = {}
        """The chunks of each version that it said last that it has."""

    def expect(self, versions: Mapping[str, Sequence[str]]) -> None:
        """See `FillingSource`."""
        self._versions, self._held = versions, {}

    async def holds(self) -> Collection[str] | None:
        """See `FillingSource`. It is not asked again about a version that it has whole."""
        try:
            for content, chunks in self._versions.items():
                if len(self._held.get(content, ())) < len(chunks):
                    bits = await self.small(f"../holdings/{content}", (len(chunks) + 7) // 8)
                    self._held[content] = held_chunks(bits, chunks)
        except NothingYet:
            return None  # an ordinary web server with the chunks of the run
        return frozenset[str]().union(*self._held.values())


def expected(manifests: Iterable[Manifest]) -> dict[str, list[str]]:
    """The chunks of some versions by their content, as a relay numbers them."""
    return {content_of(manifest): list(sized_chunks(manifest)) for manifest in manifests}


def holdings_of(chunks: Sequence[str], held: Collection[str]) -> bytes:
    """Which of a version's chunks are held, a bit each."""
    bits = bytearray((len(chunks) + 7) // 8)
    for index, chunk in enumerate(chunks):
        if chunk in held:
            bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def held_chunks(bits: bytes, chunks: Sequence[str]) -> frozenset[str]:
    """The chunks that such bits say are held. Missing bytes are zero."""
    return frozenset(
        chunk for index, chunk in enumerate(chunks) if index // 8 < len(bits) and bits[index // 8] >> index % 8 & 1
    )


class Relays:
    """The relays of a run, as the coordinator lists them, asked for now and then."""

    def __init__(self, client: Client, *, but: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`but` is a key of our own."""
        self._client, self._but, self._clock = client, but, clock
        self._listed: list[RelayEntry] = []
        self._ask_at = float("-inf")
        self._left_out = SourceBlocklist(clock)

    async def refresh(self, every_s: float = LIST_EVERY_S) -> bool:
        """Ask for the list if the last one is so old. Returns whether it names relays that the last one did not, and had
        room for: of many, each list names others."""
        if self._clock() < self._ask_at - LIST_EVERY_S + every_s:
            return False
        self._ask_at, before = self._clock() + LIST_EVERY_S, {relay.url for relay in self._listed}
        with contextlib.suppress(PeerError):
            self._listed = await self._client.get_json("/v1/relays", list[RelayEntry], deadline_s=LIST_S)
        new = {relay.url for relay in self._listed if relay.key != self._but} - before
        return bool(new) and len(before) < MOST_RELAYS  # guard: others-of-many-are-no-news

    def usable(self, sources: Sequence[ChunkSource]) -> list[ChunkSource]:
        """Sources without those that lied or were not reached lately, but always with the last one."""
        return [s for s in sources if s is sources[-1] or s.name not in self._left_out]  # guard: liars-are-left-out

    def lied(self, source: str) -> None:
        """Note that a source sent a wrong chunk."""
        self._left_out.lied(source)

    def learn(self, sources: Sequence[ChunkSource]) -> None:
        """Note which sources of a fetch did not answer at all, such as an origin behind a firewall."""
        for source in sources:
            if isinstance(source, HttpSource) and source.was_asked:
                if source.was_heard:
                    self._left_out.reached(source.name)
                else:
                    self._left_out.unreached(source.name)

    async def sources(self, rank_of_few: int = 0) -> list[RelaySource]:
        """The relays as sources; if they are few, with this rank. Nothing depends on them: there may be none."""
        await self.refresh()
        found, beside = list[RelaySource](), self._client.may_be_inside
        for relay in self._listed[:MOST_RELAYS]:
            if relay.key != self._but:
                with contextlib.suppress(PeerError):
                    found.append(RelaySource(relay, beside=beside))
        for source in found if len(found) <= FEW else []:
            source.rank = rank_of_few
        return found

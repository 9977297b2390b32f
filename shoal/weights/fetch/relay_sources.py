"""Relays as sources of chunks: like any other, but they may still be filling, and say which chunks they have.

A relay's answer is a bit for each of a version's chunks, in the order in which the manifest names them first. A fetch by
patches needs chunks of several versions, so a relay is asked about each of them. What it says may be wrong: it is asked for
a chunk and fails, and is left like any other source.

Relays are strangers. The coordinator checked that the holder of the key serves at the URL, and at which address. That
address is asked.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import NothingYet, PeerError
from shoal.net.client import Client
from shoal.protocol.messages import Manifest
from shoal.protocol.messages.batches import RelayEntry
from shoal.weights.fetch.chunks import Chunk, sized_chunks
from shoal.weights.fetch.scheduler import WRONG_CHUNKS, SourceFault, SourceScheduler
from shoal.weights.fetch.sources import ChunkSource, HttpSource, Passing, SourceAddress, is_filling
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
        """`beside` is as of `SourceAddress`. Raises `PeerError` for a bad URL."""
        url = relay.url.rstrip("/")
        address = SourceAddress(beside=beside, known=relay.address)
        super().__init__(f"{url}/v1/blobs", address, name=url, still_filling=True)
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


# --- which sources a node leaves out of its next fetches, and until when ---
#
# A fetch forgets its sources when it ends. Without this memory a source could send wrong bytes at the beginning of each
# fetch. Blame is the node's own: it tells nobody, and nobody can make it blame another.


UNREACHED_S = 600.0
"""A source that gave no answer in a whole fetch is left out for this long: the next versions must not wait for it."""

LIAR_S = 3600.0
"""A source is left out for this long when it sent WRONG_CHUNKS wrong chunks, and twice as long as before when it sends
another one afterwards."""

LONGEST_S = 7 * 86_400.0
"""Longest time for which a source is left out."""

FORGET_S = 86_400.0
"""A wrong chunk is forgotten after this time, or this long after a source was left out for the last time."""

MOST_SOURCES = 512
"""Sources that are remembered. Those that are left out for the shortest time are forgotten first."""


@dataclass
class _Memory:
    """What is remembered of a source."""

    wrong: int = 0
    """Wrong chunks that it sent."""
    times: int = 0
    """How often it was left out for them."""
    until: float = 0.0
    """It is left out until then."""
    forget_at: float = 0.0


class SourceBlocklist:
    """The sources that a node leaves out, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, _Memory] = {}

    def __contains__(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and self._clock() < known.until

    def reached(self, name: str) -> None:
        """A source answered. If it lied, it stays out."""
        if (known := self._known.get(name)) is not None and not known.wrong:
            del self._known[name]

    def unreached(self, name: str) -> None:
        """A source gave no answer in a whole fetch."""
        known, now = self._of(name), self._clock()
        known.until = max(known.until, now + UNREACHED_S)
        known.forget_at = max(known.forget_at, known.until)

    def lied(self, name: str) -> None:
        """A source sent a wrong chunk."""
        known, now = self._of(name), self._clock()
        known.wrong += 1
        if known.wrong >= WRONG_CHUNKS and known.until <= now:  # the first may have been damaged on the way
            known.until = now + min(LIAR_S * 2.0 ** min(known.times, 16), LONGEST_S)
            known.times += 1
        known.forget_at = max(known.until, now) + FORGET_S

    def _of(self, name: str) -> _Memory:
        """What is known of a source, if that is not to be forgotten. There is room for it."""
        now = self._clock()
        self._known = {other: known for other, known in self._known.items() if now < known.forget_at}
        while len(self._known) >= MOST_SOURCES and name not in self._known:  # guard: few-are-remembered
            del self._known[min(self._known, key=lambda other: self._known[other].until)]
        return self._known.setdefault(name, _Memory())


# --- which source has which chunks, within a fetch ---


ASK_SOON_S, ASK_EVERY_S = 0.5, 1.0
"""Time between the first two questions to a source that lacks chunks, and between all others."""

ASK_SELDOM_S = 4.0
"""The same while it is known to have LOOK_AT chunks that wait: in a swarm everybody asks everybody, and each question costs
two machines milliseconds."""

LOOK_AT = 32
"""Of so many chunks the rarest is asked for."""


class Holdings:
    """What the sources of a fetch have, by their index. A source that never says so has everything."""

    def __init__(self, sources: Sequence[ChunkSource], choice: SourceScheduler, waiting: Collection[Chunk]) -> None:
        """`waiting` are all chunks that are wanted, in the order in which they are best asked for, last first. The caller
        takes out those that were asked for."""
        self._choice, self._waiting, self._wanted = choice, waiting, frozenset(piece.digest for piece in waiting)
        self._fillers = {i: source for i, source in enumerate(sources) if is_filling(source)}
        self._held: dict[int, Collection[str]] = {index: frozenset() for index in self._fillers}
        self._offered = {index: [] if index in self._fillers else [*waiting] for index in range(len(sources))}
        """The waiting chunks that each source has, last first, and perhaps some that wait no longer."""
        for index in self._fillers:
            choice.sources[index].idle = True

    @property
    def fillers(self) -> list[int]:
        """The sources that say what they have."""
        return list(self._fillers)

    def lacks(self, piece: Chunk) -> list[int]:
        """The sources that do not have a chunk."""
        return [index for index, held in self._held.items() if piece.digest not in held]

    def pick(self, index: int) -> Chunk | None:
        """The waiting chunk that a source is asked for: one that is begun, or the rarest of some.

        Without any, the source is idle until it says more, or `waits_again`.
        """
        found = self._some(index)
        if not found:
            self._choice.sources[index].idle = True
            return None
        return min(found, key=self._order) if self._fillers else found[0]

    def _some(self, index: int) -> list[Chunk]:
        """At most LOOK_AT waiting chunks that a source has."""
        offered, found = self._offered[index], dict[Chunk, None]()
        while offered and len(found) < LOOK_AT:
            piece = offered.pop()
            if piece in self._waiting:
                found[piece] = None  # once, however often it waited again
        offered.extend(reversed(found))
        return [*found]

    def waits_again(self, piece: Chunk) -> None:
        """A chunk that was asked for waits again."""
        for index, offered in self._offered.items():
            if piece.digest in self._held.get(index, (piece.digest,)):
                offered.append(piece)
                self._choice.sources[index].idle = False

    def _offers(self, index: int, held: Collection[str] | None) -> None:
        """A source says that it has chunks; None means all."""
        if held is None:
            self._held.pop(index, None)
        else:
            self._held[index] = held
        self._offered[index] = [piece for piece in self._waiting if held is None or piece.digest in held]
        self._choice.sources[index].idle = False

    async def follow(
        self, index: int, changed: Callable[[], None], blame: Callable[[SourceFault, str, float], None]
    ) -> None:
        """Ask a source what it has until it has everything that is wanted. `blame` is told of its faults."""
        clock = asyncio.get_running_loop().time
        source, standing = self._fillers[index], self._choice.sources[index]
        most, pause_s = 0, ASK_SOON_S
        while not standing.never:
            try:
                held = await source.holds()
            except PeerError as error:
                blame(SourceFault.FAILED, str(error), error.retry_s if isinstance(error, Passing) else 0.0)
            else:
                if held is None or held != self._held[index]:
                    self._offers(index, held)
                    changed()
                if held is not None and (count := len(self._wanted.intersection(held))) > most:
                    most, standing.grew_at = count, clock()
                if held is None or self._wanted <= frozenset(held):
                    return
            asked_at = clock()
            await asyncio.sleep(max(pause_s, standing.rests_until - asked_at))
            while len(self._some(index)) == LOOK_AT and clock() - asked_at < ASK_SELDOM_S:
                await asyncio.sleep(ASK_EVERY_S)
                standing.grew_at = clock()
            pause_s = ASK_EVERY_S

    def _order(self, piece: Chunk) -> tuple[bool, int]:
        return piece.part is None, sum(piece.digest in held for held in self._held.values())

"""Which source has which chunks, where a source says so: relays that are still filling have some and lack others.

What a source says may be wrong: it is asked for a chunk and fails, and is left like any other source.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from shoal.errors import PeerError
from shoal.weights.fetch.chunks import Chunk
from shoal.weights.fetch.scheduler import SourceFault, SourceScheduler
from shoal.weights.fetch.sources import ChunkSource, Passing, is_filling

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

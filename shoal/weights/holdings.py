"""Which source has which chunks, where a source says so: relays that are still filling have some and lack others.

Called by `transfer`, which asks for what is rare first, so that the sources of a swarm soon have all chunks together. What
a source says may be wrong: it is asked for a chunk and fails, and is left like any other source.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from shoal.errors import PeerError
from shoal.weights.choose import Choice, Fault
from shoal.weights.pieces import Piece
from shoal.weights.sources import FillingSource, Passing, Source

ASK_SOON_S, ASK_EVERY_S = 0.5, 1.0
"""Time between the first two questions to a source that lacks chunks, and between all others."""

LOOK_AT = 32
"""Of so many chunks the rarest is asked for."""


class Holdings:
    """What the sources of a fetch have, by their index. A source that never says so has everything."""

    def __init__(self, sources: Sequence[Source], choice: Choice, wanted: Collection[Piece]) -> None:
        self._fillers = {i: source for i, source in enumerate(sources) if isinstance(source, FillingSource)}
        self._choice, self._wanted = choice, frozenset(piece.digest for piece in wanted)
        self._held: dict[int, Collection[str]] = {index: frozenset() for index in self._fillers}
        for index in self._fillers:
            choice.sources[index].idle = True

    @property
    def fillers(self) -> list[int]:
        """The sources that say what they have."""
        return list(self._fillers)

    def lacks(self, piece: Piece) -> list[int]:
        """The sources that do not have a chunk."""
        return [index for index, held in self._held.items() if piece.digest not in held]

    def pick(self, index: int, waiting: Sequence[Piece]) -> int | None:
        """The place in `waiting` of the chunk that a source is asked for: one that is begun, or the rarest of some.

        Without any, the source is idle until it says more, or `waits_again`.
        """
        if not self._fillers:
            return len(waiting) - 1
        held, found = self._held.get(index), list[int]()
        for place in range(len(waiting) - 1, -1, -1):
            if held is None or waiting[place].digest in held:
                found.append(place)
                if len(found) == LOOK_AT:
                    break
        if not found:
            self._choice.sources[index].idle = True
            return None
        return min(found, key=lambda place: self._order(waiting[place]))

    def waits_again(self, piece: Piece) -> None:
        """A chunk that was asked for waits again."""
        for index in self._fillers:
            if piece.digest in self._held.get(index, (piece.digest,)):
                self._choice.sources[index].idle = False

    async def follow(self, index: int, changed: Callable[[], None], blame: Callable[[Fault, str, float], None]) -> None:
        """Ask a source what it has until it has everything that is wanted. `blame` is told of its faults."""
        clock = asyncio.get_running_loop().time
        source, standing = self._fillers[index], self._choice.sources[index]
        most, pause_s = 0, ASK_SOON_S
        while not standing.never:
            try:
                held = await source.holds()
            except PeerError as error:
                blame(Fault.FAILED, str(error), error.retry_s if isinstance(error, Passing) else 0.0)
            else:
                if held is None:
                    self._held.pop(index, None)
                    standing.idle = False
                elif held != self._held[index]:
                    self._held[index], standing.idle = held, False
                    if (count := len(self._wanted.intersection(held))) > most:
                        most, standing.grew_at = count, clock()
                changed()
                if held is None or self._wanted <= frozenset(held):
                    return
            await asyncio.sleep(max(pause_s, standing.rests_until - clock()))
            pause_s = ASK_EVERY_S

    def _order(self, piece: Piece) -> tuple[bool, int]:
        return piece.part is None, sum(piece.digest in held for held in self._held.values())

"""Which sources a node leaves out of its next fetches, and until when: those that lied, and those that it cannot reach.

A fetch forgets its sources when it ends. Without this memory a source could send wrong bytes at the beginning of each
fetch. Blame is the node's own: it tells nobody, and nobody can make it blame another.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.weights.fetch.scheduler import WRONG_CHUNKS

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

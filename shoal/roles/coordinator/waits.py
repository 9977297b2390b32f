"""Places for those who wait for news: a few for each network, and not many in all; the run's publishers have their own.

Called by `api` for those who wait for a version or a batch. A wait costs a connection that is not closed to make room for
others, so a flood of waits would keep them out. A caller without a place is answered at once, and asks again later.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.roles.coordinator.crowds import crowd_of

MOST_WAITS, MOST_OF_A_CROWD = 512, 32
"""Callers that wait at one time: an eighth of all connections, and room for all relays that can be listed."""


class Waits:
    """The callers that wait."""

    def __init__(self, most: int = MOST_WAITS, of_a_crowd: int = MOST_OF_A_CROWD) -> None:
        self._most, self._of_a_crowd = most, of_a_crowd
        self._of: Counter[str] = Counter()
        self._of_publishers: Counter[str] = Counter()

    @contextmanager
    def place(self, host: str, publisher: str = "") -> Iterator[bool]:
        """Whether a caller from an address may wait; it has its place until the context ends. `publisher` is the key of
        the run's that signed the request: each has its own places, whatever strangers hold."""
        crowd = publisher or crowd_of(host)
        held = self._of_publishers if publisher else self._of  # guard: publishers-wait-apart
        if held.total() >= self._most or held[crowd] >= self._of_a_crowd:  # guard: few-wait
            yield False
            return
        held[crowd] += 1
        try:
            yield True
        finally:
            held.subtract((crowd,))
            held += Counter()  # forgets a network of which nobody waits

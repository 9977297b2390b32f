"""Places for strangers who wait for news: a few for each network, and not many in all.

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

    @contextmanager
    def place(self, host: str) -> Iterator[bool]:
        """Whether a caller from an address may wait; it has its place until the context ends."""
        crowd = crowd_of(host)
        if self._of.total() >= self._most or self._of[crowd] >= self._of_a_crowd:  # guard: few-wait
            yield False
            return
        self._of[crowd] += 1
        try:
            yield True
        finally:
            self._of -= Counter((crowd,))  # forgets a network of which nobody waits

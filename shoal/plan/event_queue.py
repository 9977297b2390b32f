"""Simulated time: what is to happen when. Used by `simulate` and by the parts of a simulated run."""

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """The present, in seconds, and what comes later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order, self._later = itertools.count(), list[tuple[float, int, Callable[[], None]]]()

    def after(self, wait_s: float, then: Callable[[], None]) -> None:
        """Let something happen after this time; of two things at the same time, the first that was planned comes first."""
        heapq.heappush(self._later, (self.now + wait_s, next(self._order), then))

    def next_at(self) -> float:
        """When the next thing happens; infinite if there is none."""
        return self._later[0][0] if self._later else math.inf

    def go_on(self) -> None:
        """Let the next thing happen."""
        self.now, _, then = heapq.heappop(self._later)
        then()

"""Tells how far a fetch is, if it takes more than a moment.

Called by `transfer`. It gets the time, and passes lines on.
"""

from collections import deque
from collections.abc import Callable

FIRST_REPORT_S = 3.0
"""A fetch that takes less than this is not worth a line."""

REPORT_EVERY_S = 10.0

WINDOW_S = 30.0
"""The rate told is that of the last so many seconds."""


class Progress:
    """Bytes of a fetch as they come."""

    def __init__(self, total_bytes: int, now: float, tell: Callable[[str], None]) -> None:
        """`tell` receives a line such as "fetched=31% of_mb=1000 mb_per_s=6.2 left_s=111 sources=3"."""
        self._total, self._tell, self._next_at = total_bytes, tell, now + FIRST_REPORT_S
        self._seen = deque([(now, 0)])

    def at(self, now: float, here_bytes: int, num_sources: int) -> None:
        """Tell how far the fetch is, if it is time."""
        self._seen.append((now, here_bytes))
        while now - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        if now < self._next_at:
            return
        self._next_at = now + REPORT_EVERY_S
        then, before = self._seen[0]
        rate = max(0.0, (here_bytes - before) / (now - then))
        left = f"{(self._total - here_bytes) / rate:.0f}" if rate else "unknown"
        self._tell(
            f"fetched={here_bytes / self._total:.0%} of_mb={self._total / 1e6:.0f} mb_per_s={rate / 1e6:.2f} "
            f"left_s={left} sources={num_sources}"
        )

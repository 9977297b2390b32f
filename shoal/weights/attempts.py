"""Requests for chunks that are under way: which come too slowly, and what two that race for one chunk cost.

Called by `transfer`. These are decisions about numbers: nothing here asks, waits or writes.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.weights.choose import Choice, Fault
from shoal.weights.pieces import Part, Piece

IN_FLIGHT = 16
"""Requests at one time."""

FASTER = 4.0
"""A request is ended when all IN_FLIGHT are taken and an idle source would be this many times as fast."""

LOOK_S = 1.0
"""A request is not called late earlier than this."""

JUDGE_S = 5.0
"""A request is not called slow earlier than this."""

RACE_GAIN = 2.0
"""When no chunk waits, one that is under way is asked of a second source if that would take less than the first by this
factor."""

RACE_AFTER_S = 0.5
"""A race must gain at least this much time."""


@dataclass(eq=False)
class Attempt:
    """One request to a source for one chunk."""

    source: int
    piece: Piece
    part: Part
    began: float
    first: int
    """Bytes of the chunk that were here when it began."""
    heard: float
    """When bytes came last."""
    counted: tuple[float, int]
    """When, and at how many bytes, its rate was measured last."""
    answered_at: float | None = None
    """When its first bytes came."""
    raced_from: int | None = None
    """If two sources send the chunk: bytes of it that were here when the second was asked."""
    task: "asyncio.Task[None] | None" = None
    has_begun: bool = False
    """Whether the task runs. If it were cancelled before, it would end without a word."""
    ended: tuple[Fault, str] | None = None
    """Why we ended it, if for a fault of its source."""
    lost: bool = False
    """Whether we ended it because another source sends the same chunk."""

    @property
    def got(self) -> int:
        """Bytes that it brought."""
        return self.part.size - self.first

    def pace(self, now: float, rate: float) -> float:
        """Bytes a second so far; `rate`, that of its source, if it has just begun."""
        ran_s = now - self.began
        return max(1.0, self.got / ran_s if ran_s > 1.0 else rate)

    def left_s(self, now: float, rate: float) -> float:
        """Seconds until it is expected to be done. A silence is expected to last as long again."""
        return max((self.piece.size - self.part.size) / self.pace(now, rate), now - self.heard)


def latest(
    attempts: Sequence[Attempt], choice: Choice, now: float, lacks: Callable[[Piece], Collection[int]]
) -> tuple[Attempt, int] | None:
    """Of the chunks that a free source would bring much sooner, the one that would come last: its slowest attempt, and
    that source. `lacks`: which sources do not have a chunk."""
    by_piece: dict[Piece, list[Attempt]] = {}
    for each in attempts:
        if not each.lost and each.ended is None and now - each.began > LOOK_S:
            by_piece.setdefault(each.piece, []).append(each)
    left_s = {each: each.left_s(now, choice.rate(each.source, now)) for each in attempts}
    for rivals in sorted(by_piece.values(), key=lambda rivals: -min(left_s[each] for each in rivals)):
        source = choice.fastest(now, but={*(each.source for each in rivals), *lacks(rivals[0].piece)})
        if source is None:
            continue
        here = max(each.part.size for each in rivals)
        other_s = (rivals[0].piece.size - here) / choice.rate(source, now)
        if min(left_s[each] for each in rivals) > max(RACE_GAIN * other_s, other_s + RACE_AFTER_S):
            return max(rivals, key=lambda each: left_s[each]), source
    return None


def hindrance(attempts: Sequence[Attempt], choice: Choice, now: float) -> Attempt | None:
    """The slowest attempt, if a source that is much faster has nothing to do because all requests are taken."""
    judged = [each for each in attempts if now - each.began > JUDGE_S and each.ended is None]
    slowest = min(judged, key=lambda each: each.pace(now, 0.0), default=None)
    if slowest is None or len(attempts) < IN_FLIGHT:
        return None
    faster = choice.fastest(now, but={slowest.source})
    if faster is None or choice.rate(faster, now) < FASTER * slowest.pace(now, 0.0):
        return None
    return slowest


def bytes_twice(attempts: Sequence[Attempt]) -> int:
    """Bytes that two sources have sent so far of the chunks for which they race."""
    sizes: dict[Piece, list[int]] = {}
    for each in attempts:
        if each.raced_from is not None and not each.lost:
            sizes.setdefault(each.piece, []).append(max(0, each.part.size - each.raced_from))
    return sum(min(two) for two in sizes.values() if len(two) > 1)

"""Which chunk is asked of which source next, and when it is asked again elsewhere."""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shoal.weights.fetch.chunks import Chunk, PartialChunk

# --- Which source is asked for the next chunk, and which are left alone for how long ---
#
# Clock and randomness are arguments, so a fetch replays from a seed.
#
# A source's rate is that of one request: its bytes over its seconds, both halved every HALF_LIFE_S, together with PRIOR_S
# seconds at the mean of the others. So a source that was slow is tried again when what was measured of it has faded.


HALF_LIFE_S = 15.0
"""What was measured of a source counts half as much after this time."""

PRIOR_S = 0.5
"""Weight of the others' mean rate in that of a source."""

FIRST_RATE = 1e6
"""Bytes a second that a source is believed to give before anything was measured of it, if the others give less. So a new
source is tried when all others are slow."""

EXPLORE = 0.05
"""Share of the choices that are made without regard to rates."""

LANES, MOST_LANES = 2, 6
"""Requests that a source gets at one time, so that its line is never idle between two chunks: one until it has given a
chunk without a fault since, then more the more of their time requests wait for their first byte."""

WORTH = 3.0
"""A source is not asked for a chunk for which it would need more than this many times what the others need for all that
waits."""

WRONG_CHUNKS = 2
"""A source that sent so many wrong chunks is never asked again. The first may have been damaged on the way."""

SPARE_AFTER_S = 5.0
"""A source is no longer spared when no source of a lower rank has sent anything for this long."""

SPARE_GAIN = 2.0
"""Nor, after the same time, when it is believed to be this many times as fast as all of lower ranks together. Otherwise
sources that only trickle could keep a fetch from the others."""

SAY_S = 0.6
"""In the first so many seconds, sources of higher ranks wait also for a source that has none of the wanted chunks: it may
have them when it is asked again."""

FILLING_S = 2.0
"""Higher ranks also wait for so long after a source said that it has more chunks than before, or had much to give: it may
still be filling."""

LAST = 2
"""The rank of a source that is asked only while no origin answers. Origins have every chunk, and one that is slow still
answers. When none does, this source gets their rank."""

LONGEST_PAUSE_S = 30.0
"""Pauses double with each fault until the source has given a chunk."""

LEAST_S = 1.0
"""Differences of rate that cost less time than this do not matter."""


class SourceFault(Enum):
    """Why a source is left alone."""

    FAILED = "it does not answer, or stopped"
    SLOW = "others are much faster"
    WRONG = "it sent wrong bytes"


FIRST_PAUSE_S = {SourceFault.FAILED: 0.5, SourceFault.SLOW: 5.0, SourceFault.WRONG: 0.5}


@dataclass
class SourceStats:
    """What is known of a source in this fetch."""

    name: str
    rank: int = 0
    """Sources of a higher rank are spared."""
    busy: int = 0
    """Requests that it is answering."""
    proven: bool = False
    """Whether it gave a chunk, and no fault since."""
    faults: int = 0
    """In a row, since it gave a chunk."""
    wrong: int = 0
    """Wrong chunks that it sent."""
    idle: bool = False
    """Whether it has no chunk that waits, as far as is known."""
    grew_at: float = float("-inf")
    """When it said last that it has more chunks than before, or was known to have much to give."""
    rests_until: float = 0.0
    never: bool = False
    """Whether it is never asked again in this fetch."""
    fault: SourceFault | None = None
    """Its last one."""
    reason: str = ""
    """Of its last fault."""
    failed_at: float = float("-inf")
    asked_at: float = float("-inf")
    """When it was asked while it was answering nothing else."""
    heard_at: float = float("-inf")
    """When it sent bytes last."""
    num_bytes: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0
    """For first bytes, of the `ran_s` that requests took."""
    ran_s: float = 0.0
    measured_at: float = 0.0

    @property
    def lanes(self) -> int:
        """Requests that it should get at one time."""
        if not self.proven:
            return 1
        moving = 1 - self.waited_s / self.ran_s if self.ran_s else 1.0
        return min(MOST_LANES, round(LANES / max(moving, 0.1)))

    def fade(self, now: float) -> None:
        """Let what was measured count less as it gets older."""
        share = 0.5 ** (max(0.0, now - self.measured_at) / HALF_LIFE_S)
        self.num_bytes, self.seconds, self.measured_at = self.num_bytes * share, self.seconds * share, now
        self.waited_s, self.ran_s = self.waited_s * share, self.ran_s * share


class SourceScheduler:
    """The standing of all sources of a fetch, by their index."""

    def __init__(
        self,
        names: Sequence[str],
        rng: random.Random,
        *,
        ranks: Sequence[int] = (),
        origins: Collection[int] = (),
        now: float = 0.0,
    ) -> None:
        """`ranks` are 0 if they are not given; `origins` are for sources of rank `LAST`. `now` is when the fetch begins."""
        self.sources = [SourceStats(name, rank) for name, rank in zip(names, ranks or [0] * len(names), strict=True)]
        self._origins = [self.sources[index] for index in origins]
        self._rng, self._began = rng, now

    def measured(self, index: int, num_bytes: int, seconds: float, now: float) -> None:
        """A request to a source brought bytes in some seconds; also when it brought none."""
        source = self.sources[index]
        source.fade(now)
        source.num_bytes += num_bytes
        if num_bytes:
            source.heard_at = now
        source.seconds += seconds

    def answered(self, index: int, waited_s: float, ran_s: float, now: float) -> None:
        """A request has ended, and of its time it waited so long for its first byte."""
        source = self.sources[index]
        source.fade(now)
        source.waited_s += waited_s
        source.ran_s += ran_s

    def rate(self, index: int, now: float) -> float:
        """Bytes a second that one more request to a source is expected to bring."""
        return self._rate(self.sources[index], self._mean_rate(), now)

    def _rate(self, source: SourceStats, mean: float, now: float) -> float:
        source.fade(now)
        prior = mean if source.seconds else max(FIRST_RATE, mean)
        return (source.num_bytes + PRIOR_S * prior) / (source.seconds + PRIOR_S)

    def _mean_rate(self) -> float:
        rates = [s.num_bytes / s.seconds for s in self.sources if s.seconds > 0 and not s.never]
        return max(1.0, sum(rates) / len(rates)) if rates else FIRST_RATE

    def may_ask(self, index: int, now: float) -> bool:
        """Whether a source can take one more request."""
        source = self.sources[index]
        return source.busy < source.lanes and self._may_send(index, now)

    def _may_send(self, index: int, now: float) -> bool:
        """Whether a source may be sending us chunks that wait."""
        source = self.sources[index]
        return not (source.never or source.idle or source.rests_until > now or self._is_spared(index, now))

    def asked(self, index: int, now: float) -> None:
        """A source is asked for a chunk."""
        source = self.sources[index]
        if not source.busy:
            source.asked_at = now
        source.busy += 1

    def _is_spared(self, index: int, now: float) -> bool:
        """Whether sources of lower ranks do as well."""
        rank = self.sources[index].rank
        if rank == LAST:
            if any(self._is_up(origin, now) for origin in self._origins):  # guard: last-only-if-others-fail
                return True
            rank = min((origin.rank for origin in self._origins), default=LAST - 1)
        lower = [
            other
            for other, source in enumerate(self.sources)
            if source.rank < rank
            and not source.never
            and source.rests_until <= now
            and self._may_give(source, now)
            and now - max(self._began, source.heard_at) < SPARE_AFTER_S
        ]
        if not lower or now - self._began < SPARE_AFTER_S:
            return bool(lower)
        known = [self.sources[other] for other in lower if self.sources[other].seconds > 0]
        together = sum(source.num_bytes / source.seconds * max(1, source.busy) for source in known)
        spared = self.sources[index]
        spared.fade(now)
        rate = (spared.num_bytes + PRIOR_S * FIRST_RATE) / (spared.seconds + PRIOR_S)
        return rate < SPARE_GAIN * together  # guard: tricklers-spare-nobody

    def next(self, now: float, size: int, waiting_bytes: int) -> int | None:
        """The source to ask for a chunk of `size` bytes while so many wait, or None if none should be asked now."""
        mean = self._mean_rate()
        rates = {
            index: self._rate(source, mean, now)
            for index, source in enumerate(self.sources)
            if self._may_send(index, now)
        }
        free = [
            index
            for index in rates
            if self.sources[index].busy < self.sources[index].lanes and _is_worth(index, rates, size, waiting_bytes)
        ]
        if not free:
            return None
        if self._rng.random() < EXPLORE:
            return self._rng.choice(free)
        return self._rng.choices(free, [rates[index] / (1 + self.sources[index].busy) for index in free])[0]

    def _is_up(self, origin: SourceStats, now: float) -> bool:
        """Whether nothing shows that an origin does not answer: perhaps it was not asked. A slow one does."""
        is_mute = origin.busy > 0 and origin.heard_at < self._began and now - origin.asked_at >= SPARE_AFTER_S
        has_failed = origin.rests_until > now and origin.fault is not SourceFault.SLOW
        return not (origin.never or has_failed or is_mute)

    def _may_give(self, source: SourceStats, now: float) -> bool:
        """Whether a source has chunks that wait, or may have some soon."""
        if not source.idle or now - self._began < SAY_S:
            return True
        return now - source.grew_at < FILLING_S  # guard: idle-spares-nobody

    def fastest(self, now: float, but: Collection[int]) -> int | None:
        """The free source that would give a chunk soonest, other than those of `but`."""
        free = [index for index in range(len(self.sources)) if index not in but and self.may_ask(index, now)]
        return max(free, key=lambda index: self.rate(index, now), default=None)

    def gave(self, index: int) -> None:
        """A source's chunk was right."""
        self.sources[index].faults, self.sources[index].proven = 0, True

    def failed(self, index: int, fault: SourceFault, reason: str, now: float, *, pause_s: float = 0.0) -> float | None:
        """Leave a source alone for a growing pause, at least `pause_s`.

        Returns the seconds; inf means for good, and None that it is left alone already: its requests fail together.
        """
        source = self.sources[index]
        if source.never or (source.rests_until > now and fault is not SourceFault.WRONG):
            source.failed_at = now
            source.fault = source.fault if fault is SourceFault.SLOW else fault
            return None
        source.wrong += fault is SourceFault.WRONG
        source.proven = False
        source.fault, source.reason, source.failed_at = fault, reason, now
        if source.wrong >= WRONG_CHUNKS:  # guard: liars-are-left
            self.never(index, reason, now)
            return float("inf")
        grown_s = FIRST_PAUSE_S[fault] * 2.0 ** min(source.faults, 16)
        source.faults += 1
        rest_s = max(min(grown_s, LONGEST_PAUSE_S) * (0.5 + 0.5 * self._rng.random()), pause_s)
        source.rests_until = max(source.rests_until, now + rest_s)
        return rest_s

    def never(self, index: int, reason: str, now: float) -> None:
        """Never ask a source again in this fetch."""
        source = self.sources[index]
        source.never, source.reason, source.failed_at = True, reason, now

    def next_end_of_rest(self, now: float) -> float | None:
        """When the next source may be asked again, if any is left alone or spared for now."""
        rests = [s.rests_until for s in self.sources if not s.never and s.rests_until > now]
        spared = [max(self._began, s.heard_at, s.asked_at) + SPARE_AFTER_S for s in self.sources]
        spared += [max(self._began + SAY_S, s.grew_at + FILLING_S) for s in self.sources if s.idle]
        return min([*rests, *(at for at in spared if at > now)], default=None)


def _is_worth(index: int, rates: Mapping[int, float], size: int, waiting_bytes: int) -> bool:
    """Whether a source would not hold up the end: the others would give one chunk, and all that waits, much sooner."""
    others = [rate for other, rate in rates.items() if other != index]
    if not others:
        return True
    others_s = max(size / max(others), waiting_bytes / (LANES * sum(others)))
    return size / rates[index] <= max(LEAST_S, WORTH * others_s)


# --- Requests for chunks that are under way ---
#
# Which come too slowly, and what two that race for one chunk cost.


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
    piece: Chunk
    part: PartialChunk
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
    ended: tuple[SourceFault, str] | None = None
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
    attempts: Sequence[Attempt], choice: SourceScheduler, now: float, lacks: Callable[[Chunk], Collection[int]]
) -> tuple[Attempt, int] | None:
    """Of the chunks that a free source would bring much sooner, the one that would come last: its slowest attempt, and
    that source. `lacks`: which sources do not have a chunk."""
    by_piece: dict[Chunk, list[Attempt]] = {}
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


def hindrance(attempts: Sequence[Attempt], choice: SourceScheduler, now: float) -> Attempt | None:
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
    sizes: dict[Chunk, list[int]] = {}
    for each in attempts:
        if each.raced_from is not None and not each.lost:
            sizes.setdefault(each.piece, []).append(max(0, each.part.size - each.raced_from))
    return sum(min(two) for two in sizes.values() if len(two) > 1)

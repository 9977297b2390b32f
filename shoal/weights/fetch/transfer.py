"""Transfer of a version's missing chunks from several sources at once, and its progress.

`scheduler` decides who is asked. A transfer ends as long as one source serves right bytes, however slowly. No chunk is held
in memory.

A chunk that one source began may be finished by another. If the whole is then wrong, nobody is blamed yet: the chunk is
fetched again from one source alone, and the sources of bytes that differ from the right ones are named. Otherwise a
source could send bad bytes, stop, and let an honest one be blamed.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import PeerError
from shoal.weights.fetch.chunks import Chunk, PartialChunk, ReceivedRange
from shoal.weights.fetch.relay_sources import Holdings
from shoal.weights.fetch.scheduler import (
    IN_FLIGHT,
    LAST,
    Attempt,
    SourceFault,
    SourceScheduler,
    bytes_twice,
    hindrance,
    latest,
)
from shoal.weights.fetch.sources import ChunkSource, HostAway, Passing, WrongBytes, is_filling

log = logging.getLogger(__name__)

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


SILENCE_S = 20.0
"""A source that sends nothing for this long is left alone, and the chunk goes on elsewhere."""

PATIENCE_S = 60.0
"""A fetch ends if no source sent anything for this long, and each has failed since."""

DUPLICATE_SHARE = 0.02
"""Share of the bytes of a fetch that may come twice because of races."""

TICK_S = 0.25


def log_blame(source: str, reason: str) -> None:
    """Log that a source is left."""
    log.warning("source=%s left=true reason=%s", source, reason)


@dataclass(frozen=True)
class TransferEvents:
    """Who hears what happens in a transfer."""

    on_blame: Callable[[str, str], None] = log_blame
    """Gets a source and a reason when the source is left, for a while or for good."""
    on_progress: Callable[[str], None] | None = None
    """Gets a line every few seconds; None: it is logged."""
    on_chunk: Callable[[str], None] = lambda digest: None
    """Gets the hash of each chunk that is in its places."""
    on_lie: Callable[[str], None] = lambda source: None
    """Gets the source of each wrong chunk."""


NO_EVENTS = TransferEvents()


class Transfer:
    """The missing chunks of one version, and the sources."""

    def __init__(
        self,
        missing: Sequence[Chunk],
        sources: Sequence[ChunkSource],
        directory: Path,
        *,
        rng: random.Random,
        events: TransferEvents,
    ) -> None:
        """`directory` takes the bytes of chunks that are not whole yet. `rng` decides order, choice and pauses."""
        self._sources = list({source.name: source for source in sources}.values())
        self._events = events
        shuffled = list(missing)
        rng.shuffle(shuffled)  # so that clients of one swarm have different chunks to give each other
        self._waiting = dict.fromkeys(shuffled)
        self._waiting_bytes = self._total_bytes = sum(piece.size for piece in missing)
        self._left = set(missing)
        self._attempts: list[Attempt] = []
        self._doubts: dict[Chunk, list[list[ReceivedRange]]] = {}
        """What several sources sent of chunks that were then wrong."""
        self._placed_bytes = self._duplicate_bytes = 0
        self._failure: OSError | None = None
        self._is_host_away = False
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        names, ranks = [source.name for source in self._sources], [source.rank for source in self._sources]
        origins = [index for index, source in enumerate(self._sources) if source.rank < LAST and not is_filling(source)]
        self._choice = SourceScheduler(names, rng, ranks=ranks, origins=origins, now=self._clock())
        self._directory = directory
        self._holdings = Holdings(self._sources, self._choice, self._waiting)
        self._heard = self._clock()
        """When any source sent bytes last."""
        self._progress = Progress(self._total_bytes, self._clock(), events.on_progress or log.info)

    async def run(self) -> None:
        """Return when all chunks are in their places. Raises `PeerError` if the sources cannot serve them, and OSError."""
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(self._follow(index)) for index in self._holdings.fillers]
            try:
                while self._left and self._failure is None and not self._is_over(self._clock()):
                    self._watch(self._clock())
                    self._ask(group, self._clock())
                    await self._wait(self._clock())
            finally:
                for task in following:
                    task.cancel()
                for attempt in self._attempts:
                    assert attempt.task is not None
                    attempt.task.cancel()
        for piece in self._left:
            if piece.part is not None:
                piece.part.close()
        if self._failure is not None:
            raise self._failure
        if self._left:
            faults = "; ".join(f"{each.name}: {each.reason}" for each in self._choice.sources) or "no source"
            raise (HostAway if self._is_host_away else PeerError)(
                f"{len(self._left)} of the chunks not fetched: {faults}. Try again later, or use another source; what was "
                "fetched is kept"
            )

    def _is_over(self, now: float) -> bool:
        """Whether nothing more is to be expected from any source."""
        asked = [source for source in self._choice.sources if not source.never]
        if self._attempts:
            return False
        patient = now - self._heard < PATIENCE_S
        return not asked or (not patient and all(s.idle or s.failed_at >= self._heard for s in asked))

    async def _wait(self, now: float) -> None:
        """Until an attempt ends, a source has rested, or it is time to look at the attempts."""
        times = [self._heard + PATIENCE_S, self._choice.next_end_of_rest(now)]
        until = min((time for time in times if time is not None and time > now), default=now + TICK_S)
        if self._attempts:
            until = min(until, now + TICK_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until + 0.001):
                await self._changed.wait()
        self._changed.clear()

    # --- who is asked for what ---

    def _ask(self, group: asyncio.TaskGroup, now: float) -> None:
        """Ask sources for waiting chunks; when none waits, ask faster sources for those that would come last."""
        while self._waiting and len(self._attempts) < IN_FLIGHT:
            source = self._choice.next(now, next(reversed(self._waiting)).size, self._waiting_bytes)
            if source is None:
                return
            piece = self._holdings.pick(source)
            if piece is None:
                continue
            del self._waiting[piece]
            self._waiting_bytes -= piece.size
            self._begin(group, piece, source, now)
        while (
            not self._waiting
            and len(self._attempts) < IN_FLIGHT
            and (race := latest(self._attempts, self._choice, now, self._holdings.lacks))
        ):
            slow, source = race
            if slow.raced_from is not None or self._duplicate_bytes >= DUPLICATE_SHARE * self._total_bytes:
                self._end(slow, SourceFault.SLOW, "another source is much faster")
                return
            with self._kept_failure():
                part = slow.piece.new_part(self._directory)
                slow.piece.part = part if slow.piece in self._doubts else slow.part.copy(part)
                slow.raced_from = part.size
                self._begin(group, slow.piece, source, now, slow.raced_from)

    def _begin(
        self, group: asyncio.TaskGroup, piece: Chunk, source: int, now: float, raced_from: int | None = None
    ) -> None:
        with self._kept_failure():
            part, piece.part = piece.part, None
            # guard: doubted-chunk-from-one
            if part is not None and piece in self._doubts and not part.is_only_from(self._sources[source].name):
                part.drop()
                part = None
            part = part or piece.new_part(self._directory)
            attempt = Attempt(source, piece, part, now, part.size, now, (now, part.size), raced_from=raced_from)
            self._choice.asked(source, now)
            self._attempts.append(attempt)
            attempt.task = group.create_task(self._attempt(attempt))

    async def _follow(self, index: int) -> None:
        """Keep track of what a source has that is still filling."""

        def blame(fault: SourceFault, reason: str, pause_s: float) -> None:
            self._blame(index, fault, reason, self._clock(), pause_s)

        await self._holdings.follow(index, self._changed.set, blame)

    # --- one attempt ---

    async def _attempt(self, attempt: Attempt) -> None:
        """Ask for the rest of a chunk, and settle what came."""
        source, problem = self._sources[attempt.source], None
        attempt.has_begun = True
        try:
            if attempt.ended is not None or attempt.lost:
                raise asyncio.CancelledError
            parts = source.parts(attempt.piece.digest, attempt.part.size, attempt.piece.size)
            async with contextlib.aclosing(parts):
                async for data in parts:
                    self._take(attempt, data)
        except PeerError as error:
            problem = error
        except asyncio.CancelledError:
            if attempt.ended is None:
                self._close(attempt)
                if attempt.lost:
                    attempt.part.drop()
                attempt.part.close()
                raise
            problem = Passing(attempt.ended[1])
        except OSError as error:
            self._failure = self._failure or error
        finally:
            self._changed.set()
        self._close(attempt)
        if attempt.piece not in self._left:
            attempt.part.drop()  # another source was sooner
        elif self._failure is None:
            with self._kept_failure():
                self._settle(attempt, problem)
        if self._failure is not None:
            attempt.part.close()  # a later try goes on with it

    def _take(self, attempt: Attempt, data: bytes) -> None:
        """Keep bytes that came. Raises `WrongBytes` if they are more than the chunk has."""
        now = self._clock()
        attempt.heard = self._heard = now
        if attempt.part.size + len(data) > attempt.piece.size:  # guard: no-more-than-a-chunk
            raise WrongBytes(f"sent more than the {attempt.piece.size} bytes of chunk {attempt.piece.digest[:16]}…")
        if data:
            attempt.answered_at = attempt.answered_at or now
            attempt.part.add(data, self._sources[attempt.source].name)
            if attempt.raced_from is not None:
                self._limit_race(attempt.piece)

    def _close(self, attempt: Attempt) -> None:
        """Measure an attempt that has ended, and free its source."""
        now = self._clock()
        self._measure(attempt, now)
        if attempt.answered_at is not None:
            self._choice.answered(attempt.source, attempt.answered_at - attempt.began, now - attempt.began, now)
        self._attempts.remove(attempt)
        self._choice.sources[attempt.source].busy -= 1

    def _settle(self, attempt: Attempt, problem: PeerError | None) -> None:
        """Put a chunk into its places, or hand on what there is of it; and let the source answer for it. Raises OSError."""
        piece, part, now = attempt.piece, attempt.part, self._clock()
        if part.matches(piece):
            piece.take(part.path)
            self._left.discard(piece)
            self._placed_bytes += piece.size
            self._choice.gave(attempt.source)
            self._events.on_chunk(piece.digest)
            for rival in self._rivals(piece):
                self._lose(rival)
            if isinstance(problem, WrongBytes):
                self._blame(attempt.source, SourceFault.WRONG, str(problem), now)
            liars = [liar for evidence in self._doubts.pop(piece, []) for liar in part.liars(evidence)]
            for liar in dict.fromkeys(liars):
                self._blame(
                    self._index(liar), SourceFault.WRONG, f"sent wrong bytes for chunk {piece.digest[:16]}…", now
                )
            part.drop()
            return
        if isinstance(problem, WrongBytes):
            self._blame(attempt.source, SourceFault.WRONG, str(problem), now)
        elif part.size == piece.size:
            self._doubt(attempt, now)
        elif isinstance(problem, Passing):
            fault = attempt.ended[0] if attempt.ended else SourceFault.FAILED
            self._blame(attempt.source, fault, str(problem), now, problem.retry_s)
            self._is_host_away |= problem.is_host_away
        elif problem is None:
            reason = f"sent {part.size} of the {piece.size} bytes of chunk {piece.digest[:16]}…"
            self._blame(attempt.source, SourceFault.FAILED, reason, now)
        elif not self._choice.sources[attempt.source].never:
            self._choice.never(attempt.source, str(problem), now)
            self._events.on_blame(self._sources[attempt.source].name, f"{problem}: not asked again")
        self._hand_on(piece, part, is_good=not (isinstance(problem, WrongBytes) and attempt.got))

    def _hand_on(self, piece: Chunk, part: PartialChunk, is_good: bool) -> None:
        """Keep what an attempt left of a chunk for the next one, and let the chunk wait if nobody is fetching it."""
        if is_good and 0 < part.size < piece.size and (piece.part is None or piece.part.size < part.size):
            piece.part, part = part, piece.part or part
        if part is not piece.part:
            part.drop()
        rivals = self._rivals(piece)
        for rival in rivals:  # another source may be asked beside it again
            if rival.raced_from is not None:
                self._duplicate_bytes += max(0, min(rival.part.size, part.size) - rival.raced_from)
            rival.raced_from = None
        if not rivals:
            self._waiting[piece] = None  # next, so that few chunks are begun and a doubt is soon resolved
            self._waiting_bytes += piece.size
            self._holdings.waits_again(piece)

    def _doubt(self, attempt: Attempt, now: float) -> None:
        """A whole chunk was wrong. Blame its only source, or keep the evidence until the right bytes are here."""
        piece, part, name = attempt.piece, attempt.part, self._sources[attempt.source].name
        if part.is_only_from(name):
            self._blame(attempt.source, SourceFault.WRONG, f"sent wrong bytes for chunk {piece.digest[:16]}…", now)
        else:
            self._doubts.setdefault(piece, []).append(part.evidence())  # guard: blame-by-evidence

    def _blame(self, source: int, fault: SourceFault, reason: str, now: float, pause_s: float = 0.0) -> None:
        if fault is SourceFault.WRONG:
            self._events.on_lie(self._sources[source].name)
        rest_s = self._choice.failed(source, fault, reason, now, pause_s=pause_s)
        if rest_s is None:
            return
        again = "not asked again" if rest_s == float("inf") else f"asked again after {rest_s:.1f} s"
        self._events.on_blame(self._sources[source].name, f"{reason}: {again}")

    def _index(self, name: str) -> int:
        return next(index for index, source in enumerate(self._sources) if source.name == name)

    # --- watching ---

    def _watch(self, now: float) -> None:
        """Measure all attempts, and end those that bring nothing, or far less than an idle source would."""
        for attempt in [*self._attempts]:
            self._measure(attempt, now)
            heard = max(each.heard for each in self._attempts if each.source == attempt.source)
            if now - heard > SILENCE_S or now - attempt.heard > 3 * SILENCE_S:  # guard: silence-ends
                self._end(attempt, SourceFault.FAILED, f"sent nothing for {SILENCE_S:.0f} s")
        if self._waiting and (slow := hindrance(self._attempts, self._choice, now)) is not None:
            self._end(slow, SourceFault.SLOW, f"gave {slow.pace(now, 0.0) / 1000:.0f} kB/s, and others give much more")
        coming = {attempt.piece: attempt.part.size for attempt in self._attempts}
        self._progress.at(now, self._placed_bytes + sum(coming.values()), len({a.source for a in self._attempts}))

    def _measure(self, attempt: Attempt, now: float) -> None:
        then, before = attempt.counted
        self._choice.measured(attempt.source, attempt.part.size - before, now - then, now)
        attempt.counted = (now, attempt.part.size)

    def _end(self, attempt: Attempt, fault: SourceFault, reason: str) -> None:
        """End an attempt for a fault of its source."""
        if attempt.ended is None:
            attempt.ended = (fault, reason)
            self._stop(attempt)

    def _rivals(self, piece: Chunk) -> list[Attempt]:
        """The attempts at a chunk."""
        return [attempt for attempt in self._attempts if attempt.piece is piece and not attempt.lost]

    def _lose(self, attempt: Attempt) -> None:
        """End an attempt at a chunk that another source sent, or will send sooner. That is no fault."""
        if attempt.raced_from is not None:
            self._duplicate_bytes += max(0, attempt.part.size - attempt.raced_from)
        attempt.lost, attempt.ended = True, None
        self._stop(attempt)

    def _stop(self, attempt: Attempt) -> None:
        if attempt.has_begun and attempt.task is not None:
            attempt.task.cancel()

    def _limit_race(self, piece: Chunk) -> None:
        """End the one with fewer bytes of two that race for a chunk when too many bytes came twice."""
        twice = self._duplicate_bytes + bytes_twice(self._attempts)
        rivals = self._rivals(piece)
        if len(rivals) > 1 and twice > DUPLICATE_SHARE * self._total_bytes:  # guard: few-bytes-twice
            self._lose(min(rivals, key=lambda each: each.part.size))

    @contextlib.contextmanager
    def _kept_failure(self) -> Iterator[None]:
        """A disk that takes no more ends the fetch: `run` raises the error."""
        try:
            yield
        except OSError as error:
            self._failure = self._failure or error
            self._changed.set()

"""The runs that a page shows: their readings, the threads that index them, and who may ask what at a time.

Readings are used by one thread at a time, so each has a lock. It refuses private bodies and held-out episodes to all but
the host; `app` says who is the host.
"""

import gc
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, NothingYet, Overreach, PeerError, ShoalError, StateError
from shoal.evaluation_files import Transcript
from shoal.run_folder import is_url
from shoal.runs.redact import public_url, without_paths
from shoal.runs.rollouts import ReadGroup
from shoal.runs.run_reader import GroupRef, RunReader, open_run
from shoal.views.web.index.build import Builder, numbered
from shoal.views.web.index.queries import IndexQueries
from shoal.views.web.replay_gap_requests import Gaps, Rescoring

log = logging.getLogger(__name__)

CONDITION_EVERY_S = 5.0
"""How often a run is asked how it does. At a URL that comes before each look at the log (IDLE_S), which waits long for a
host that is gone."""

CHANGE_EVERY_S = 4.0
"""Pages may say something else so often: each change makes each page that somebody looks at anew, and the log of a large
run changes many times a second."""

LATE_S, LATE_STEP_S = 15.0, 5.0
"""A page of a live run says how old it is from LATE_S on, in steps of LATE_STEP_S. A busy machine may index so slowly."""

STALE_S = 60.0
"""Pages change at least this often, because they tell how long the run has waited and how much of the disk is free."""

IDLE_S = 1.0
AGAIN_S, MOST_AGAIN_S = 5.0, 600.0
"""Wait AGAIN_S before opening a failed run again. The wait doubles with each failure, up to MOST_AGAIN_S, because opening a
run reads all of its log. A run that asks for more than this machine gives waits MOST_AGAIN_S at once."""

GROUP_WAIT_S = 5.0
"""How long a request waits while the run's log is read."""

BEING_READ = "the log is being read: reload the page in a few seconds"


@dataclass
class ServedRun:
    """A run of the page."""

    where: str
    place: str = ""
    """How the index calls it; empty until it was opened."""
    number: int = -1
    """In the index."""
    generation: int = 0
    """Of the index's file, to which its builder writes."""
    reading: RunReader | None = None
    builder: Builder | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    again_at: float = 0.0
    wait_s: float = AGAIN_S
    """After the next error."""
    asked_at: float = -math.inf
    asked_of: tuple[int, str] = (-1, "")
    """Version and phase, by its log, when it was asked."""
    is_live: bool = False
    """Whether its coordinator answered then."""
    told: object = None
    """Condition, alarms and evaluations as they were noted last."""
    address: str = ""
    """Its URL, as others know it; empty if there is none."""
    is_whole: bool = False
    """Whether its log was read up to the end since it was opened. Texts of rollouts may still be missing."""
    percent: int = 0
    """How much of the log was read until then. A log that grows meanwhile does not make it less."""
    newest: int = -1
    """The number of the newest event of its log, as it was told last; -1 if nobody knows."""
    is_broken: bool = False
    """Whether the log had a fault when it was read last. That is not forgotten while it is read again."""
    trouble: str = ""
    """What keeps it from being read, as anyone may see it. The index cannot say so if it is what cannot be written."""
    warned: str = ""
    """The fault that was logged last, which is not logged again until another one comes, or the log is whole."""

    @property
    def is_own(self) -> bool:
        """Whether it is a folder of this machine."""
        return not is_url(self.where)


NO_RUN = ServedRun("", is_whole=True)
"""In the place of a run that the page does not show."""


class ServedRuns:
    """Some runs and their index. `start` indexes each in a thread; without it, each `step` indexes one page of each."""

    def __init__(
        self, path: Path, places: Sequence[str], clock: Callable[[], float] = time.monotonic,
        open_one: Callable[..., RunReader] = open_run,
    ) -> None:  # fmt: skip
        """Open all runs. Raises `ConfigError` for a folder without a run, `PeerError` for a bad URL, `StateError`."""
        self._path, self._clock, self._open_one = path, clock, open_one
        self.change = 0
        """Grows when the pages may say something else, at most once in CHANGE_EVERY_S."""
        self._is_news, self._changed_at = False, -math.inf
        self._rescoring = Rescoring()
        self._local = threading.local()
        self._file: int | None = None
        self._generation = 0
        """The index's file, and how often there was a new one. Connections to an older one show stale data."""
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._opening, self._telling = threading.Lock(), threading.Lock()
        self.runs = [ServedRun(place) for place in places]
        for shown in self.runs:
            self._open(shown)

    def start(self) -> None:
        """Index each run in a thread of its own, until `close`: a host that does not answer holds up no other run."""
        for shown in self.runs:
            thread = threading.Thread(target=self._keep, args=(shown,), name="index", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Tell the threads to end, wait a while for them, and let go of the runs."""
        self._ended.set()
        until = time.monotonic() + GROUP_WAIT_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        for shown in self.runs:
            self._let_go(shown)

    def look(self) -> IndexQueries:
        """The index, for the thread that asks."""
        found: IndexQueries | None = getattr(self._local, "look", None)
        if found is not None and self._local.generation != self._generation:  # guard: index-made-anew
            found.close()
            found = self._local.look = None
        if found is None:
            self._local.generation = self._generation
            found = self._local.look = IndexQueries(self._path)
        return found

    def look_apart(self) -> IndexQueries:
        """The index by a connection of the caller's own, which it closes. Raises `StateError`."""
        return IndexQueries(self._path)

    def at(self, place: str) -> ServedRun | None:
        """The run that the index calls so, if this page shows it."""
        return next((shown for shown in self.runs if shown.place == place), None)

    def of(self, number: int) -> ServedRun | None:
        """The run of a number in the index, if this page shows it."""
        return next((shown for shown in self.runs if shown.number == number), None)

    def _one(self, number: int) -> ServedRun:
        return self.of(number) or NO_RUN

    def trouble(self, number: int) -> str:
        """What keeps a run from being read now; empty if nothing does."""
        return self._one(number).trouble

    def fault(self, number: int) -> str:
        """Why a run's log cannot be read to its end; empty if it can."""
        shown = self._one(number)
        return shown.trouble if shown.is_broken else ""

    def being_read(self, number: int) -> str:
        """That a run's log is being read, and how much of it was; empty once it is whole, and a page shows the present."""
        shown = self._one(number)
        if shown.is_whole:
            return ""
        is_known = shown.newest >= 0 or shown.reading is None or shown.reading.state.seq < 0
        return f"reading the log, {shown.percent} %" if is_known else "reading the log"

    def unread(self, number: int) -> str:
        """In a few words why a run's log is not shown to its end; empty if it is."""
        shown = self._one(number)
        broken = "log broken" if shown.is_broken else "cannot be read now" if shown.trouble else ""
        return broken or self.being_read(number)

    def late_s(self, number: int) -> int:
        """For how long a live run was not asked how it does; 0 if that is no longer than usual."""
        shown = self._one(number)
        age_s = self._clock() - shown.asked_at if shown.is_live else 0.0
        return int(age_s // LATE_STEP_S * LATE_STEP_S) if LATE_S <= age_s < math.inf else 0

    def free_bytes(self, number: int) -> int | None:
        """Free space where a run's folder is; None for a run elsewhere."""
        shown = self._one(number)
        with suppress(OSError):
            return shutil.disk_usage(shown.where).free if shown.where and shown.is_own else None
        return None

    def gaps(self, number: int, place: GroupRef) -> Gaps:
        """The replay gaps of a group that the asker may see. Raises `NothingYet`, `ShoalError`."""
        return self._rescoring.gaps(self._one(number).where, place)

    def group(self, number: int, place: GroupRef, private: bool, parts: bool = False) -> ReadGroup:
        """A group with the text of its tokens. `private`: whether the host asks. With `parts` its environment plays it
        again and names the parts of each reward. Raises `NothingYet`, `ShoalError`."""
        with self._reading(number) as reading:
            if place.submission not in reading.state.submissions:
                raise NothingYet(BEING_READ)
            if not private and not reading.is_public(place.submission):  # guard: page-keeps-private-bodies
                raise NothingYet("this body is still private: its host alone may read it")
            found = reading.group(place, with_pieces=True)
            return with_parts(found, reading.replayed(place).group) if parts else found

    def answer(self, number: int, place: GroupRef) -> tuple[str, ...]:
        """What solves a group's task, for its host. Raises as `group`."""
        with self._reading(number) as reading:
            return reading.answer(place)

    def transcripts(self, number: int, private: bool) -> dict[tuple[str, str], tuple[Transcript, ...]]:
        """Held-out episodes by evaluation and environment; none unless the host asks. Raises `NothingYet`, `ShoalError`."""
        if not private:  # guard: page-keeps-heldout-episodes
            return {}
        with self._reading(number) as reading:
            return {
                (one.name, label): part.transcripts
                for one in reading.evaluations() for label, part in {"": one, **one.envs}.items() if part.transcripts
            }  # fmt: skip

    @contextmanager
    def _reading(self, number: int) -> Iterator[RunReader]:
        """A run's reading, while no other thread has it. Raises `NothingYet`."""
        shown = self.of(number)
        if shown is None or not shown.lock.acquire(timeout=GROUP_WAIT_S):
            raise NothingYet(BEING_READ)
        try:
            if shown.reading is None:
                raise NothingYet(BEING_READ)
            yield shown.reading
        finally:
            shown.lock.release()

    # --- indexing ---

    def step(self) -> bool:
        """Index the next page of each run. Returns whether there was anything to do."""
        busy = [self._step(shown) for shown in self.runs]
        self._tell()
        return any(busy)

    def catch_up(self) -> None:
        """Index all that there is now."""
        self._catch_up(self.step)

    def _keep(self, shown: ServedRun) -> None:
        """Index a run until the end."""

        def step() -> bool:
            busy = self._step(shown)
            self._tell()
            return busy

        self._catch_up(step)
        while not self._ended.is_set():
            if not step():
                self._ended.wait(IDLE_S)

    def _tell(self) -> None:
        """Let pages renew themselves if there is news, or if they are old."""
        with self._telling:
            if (now := self._clock()) >= self._changed_at + (CHANGE_EVERY_S if self._is_news else STALE_S):
                self._is_news, self._changed_at = False, now  # first: another thread may have news at any moment
                self.change += 1

    def _catch_up(self, step: Callable[[], bool]) -> None:
        """Index all that there is now, and take what was read out of the garbage collector's sight.

        A long log is millions of objects that stay, and each look at them would hold up a view for a third of a second.
        """
        while not self._ended.is_set() and step():
            pass
        gc.collect()
        gc.freeze()

    def _step(self, shown: ServedRun) -> bool:
        now = self._clock()
        if now < shown.again_at:
            return False
        with shown.lock:
            if self._ended.is_set():
                return False
            try:
                busy = self._advance(shown)
                shown.warned = "" if shown.is_whole else shown.warned
                return busy
            except Exception as error:  # the thread would end, and the page stay stale without a word
                if self._ended.is_set():  # `close` has let go of the run
                    return False
                wait_s = MOST_AGAIN_S if isinstance(error, Overreach) else shown.wait_s
                shown.again_at, shown.wait_s = now + wait_s, min(2 * wait_s, MOST_AGAIN_S)  # guard: index-thread-lives
                is_known, shown.is_broken = isinstance(error, ShoalError), isinstance(error, StateError)
                if str(error) != shown.warned:
                    log.warning(
                        "a run cannot be indexed, trying again later run=%s cause=%s", shown.where, error,
                        exc_info=None if is_known else error,
                    )  # fmt: skip
                shown.warned = str(error)
                self._say(shown, str(error) if is_known else f"a fault of this page ({type(error).__name__})")
                self._let_go(shown)
                return False

    def _advance(self, shown: ServedRun) -> bool:
        """Index a page of a run, and now and then how it does. Raises anything."""
        is_there = self._inode() == self._file  # guard: deleted-index-is-made-anew
        if shown.builder is None or shown.generation != self._generation or not is_there:
            self._open(shown)
        assert shown.builder is not None and shown.reading is not None
        if not shown.is_whole and shown.newest < 0:
            shown.newest = shown.reading.newest()
        busy, trouble, state = False, "", shown.reading.state
        if shown.is_whole and self._is_due(shown):
            was_live = shown.is_live
            self._note(shown)
            if was_live and not shown.is_live:
                self._changed_at = -math.inf
                self._tell()
        try:
            busy = shown.builder.advance()
        except PeerError as error:
            trouble, shown.again_at = str(error), self._clock() + AGAIN_S
        read, there = state.seq + 1, shown.newest + 1
        shown.percent = max(shown.percent, min(99, 100 * read // max(there, read, 1))) if there else 0
        if not trouble and (
            not busy or read >= there > 0
        ):  # a live log grows, and its bodies take longer than its events
            shown.wait_s = AGAIN_S
            if not shown.is_whole:
                self._is_news, shown.asked_at = True, -math.inf  # what was noted of its beginning is not the present
            shown.is_whole, shown.is_broken = True, False
        if trouble or shown.trouble or self._is_due(shown):
            self._note(shown)
            if shown.is_whole and state.phase == "ended" and not shown.is_live:
                trouble = ""  # its host has gone
            if trouble or not shown.is_broken:
                self._say(shown, trouble)
        if busy:
            self._is_news = True
        return busy

    def _is_due(self, shown: ServedRun) -> bool:
        """Whether to ask a run how it does: now and then, and once its log, that is read to the end, has another version,
        so that the figures of a page are of one moment."""
        assert shown.reading is not None
        is_past = shown.is_whole and shown.asked_of != _moment(shown.reading)
        every_s = CONDITION_EVERY_S if shown.is_own or not shown.is_whole else IDLE_S
        return is_past or self._clock() - shown.asked_at >= every_s

    def _say(self, shown: ServedRun, trouble: str) -> None:
        """Let pages say what keeps a run from being read. The host has the whole of it in the log of this process."""
        words = without_paths(trouble, shown.where) if shown.is_own else trouble  # guard: trouble-without-paths
        is_new, shown.trouble = words != shown.trouble, words
        if is_new:
            self._is_news = True

    def _open(self, shown: ServedRun) -> None:
        self._let_go(shown)
        if shown.is_own and not Path(shown.where).exists():
            raise ConfigError(f"there is no folder {shown.where}: give a run's folder or its URL")
        shown.reading = self._open_one(shown.where, private=shown.is_own)
        shown.place, shown.address = shown.reading.name, public_url(shown.where)
        shown.is_whole, shown.newest, shown.percent = False, -1, 0
        with self._opening:
            if self._file is None or self._inode() != self._file:
                self._begin()
            shown.builder, shown.generation = Builder(self._path, shown.reading), self._generation
            shown.number = shown.builder.number

    def _begin(self) -> None:
        """Begin with another index. All runs that were ever opened have a number in it, in the order of the page."""
        known = [shown for shown in self.runs if shown.place]
        for shown, number in zip(known, numbered(self._path, [one.place for one in known]), strict=True):
            shown.number = number
        self._file, self._generation = self._path.stat().st_ino, self._generation + 1

    def _inode(self) -> int:
        """Which file the index is; -1 if there is none."""
        try:
            return self._path.stat().st_ino
        except FileNotFoundError:
            return -1

    def _let_go(self, shown: ServedRun) -> None:
        builder, reading = shown.builder, shown.reading
        shown.builder = shown.reading = None
        if builder is not None:
            builder.close()
        if reading is not None:
            reading.close()

    def _note(self, shown: ServedRun) -> None:
        """Note how a run does, its evaluations and alarms. Raises `ShoalError`."""
        if shown.builder is None or shown.reading is None:
            return
        shown.asked_at, shown.asked_of = self._clock(), _moment(shown.reading)
        if not shown.is_whole:
            shown.newest = shown.reading.newest()
        shown.builder.note_condition()
        found = repr((self.look().alarms(shown.number), self.look().heldout(shown.number)))
        row = self.look().rows("SELECT told, is_live FROM conditions WHERE run = ?", shown.number)
        told = (_without_clock(row[0]["told"]), row[0]["is_live"]) if row else None
        shown.is_live = bool(row and row[0]["is_live"])
        before, shown.told = shown.told, (told, found)
        if shown.told != before:
            self._is_news = True


def _moment(reading: RunReader) -> tuple[int, str]:
    return reading.state.main.version, reading.state.phase


def _without_clock(told: str) -> dict[str, Any]:
    """A condition without what grows each second."""
    return {name: value for name, value in json.loads(told).items() if name != "waiting_s"}


def with_parts(group: ReadGroup, played: ReadGroup) -> ReadGroup:
    """A group with what the replay says of its rewards."""
    told = {rollout.index: rollout for rollout in played.rollouts}
    return replace(group, rollouts=tuple(
        replace(
            r, parts=told[r.index].parts, metrics=told[r.index].metrics, problem=told[r.index].problem,
            fault=told[r.index].fault,
        )
        for r in group.rollouts
    ))  # fmt: skip

"""A queue of answers that people rate: a folder with one SQLite file.

Environments put answers in and read ratings; people rate with `shoal env rate`. Several processes may share the folder.
A rating counts once it is committed, so a kill loses at most what a person was typing. If a rater takes an item and
does not rate it, others get it after `HELD_S`.
"""

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ConfigError, StateError
from shoal.graders.grade import Grade, partly, undecided
from shoal.graders.llm_judge import cohen_kappa

HELD_S = 900.0
"""How long a rater keeps an item before others can get it."""

TOP = 10
"""The best rating; 0 is the worst."""

MAX_ITEM_CHARS = 100_000
"""Limit on the length of a question, and of an answer."""

_TABLES = """
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, question TEXT NOT NULL, answer TEXT NOT NULL, place INTEGER NOT NULL,
    holder TEXT NOT NULL DEFAULT '', held_until REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS ratings (
    item TEXT NOT NULL REFERENCES items(id), rater TEXT NOT NULL, score INTEGER NOT NULL, note TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (item, rater)
);
"""


class Item(NamedTuple):
    """An answer to rate."""

    id: str
    """Digest of question and answer: the same pair twice is one item."""
    question: str
    answer: str


class RatingProgress(NamedTuple):
    """The progress of a queue."""

    items: int
    rated: int
    """Items with enough ratings."""
    ratings: int
    kappa: float | None
    """Mean of Cohen's kappa over all pairs of raters with items in common; None if there are none. Half of `TOP` or more
    is good, less is bad."""


class Ratings:
    """The queue in a folder, which is made if it is missing."""

    def __init__(self, folder: Path, raters_each: int = 1, clock: Callable[[], float] = time.time) -> None:
        """`raters_each`: how many people rate each item."""
        self.file, self.raters_each, self._clock = Path(folder) / "ratings.sqlite", raters_each, clock
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as base:
                base.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{self.file} cannot be opened: {error}. Give another folder, or restore it") from None

    def put(self, question: str, answer: str) -> str:
        """Put an answer into the queue, and get its id. A pair that is there already stays as it is."""
        if max(len(question), len(answer)) > MAX_ITEM_CHARS:
            raise ConfigError(
                f"an item has more than {MAX_ITEM_CHARS:,} characters: shorten the question or the answer"
            )
        item = hashlib.sha256(f"{len(question)}\n{question}{answer}".encode("utf-8", "surrogatepass")).hexdigest()
        texts = [text.encode("utf-8", "replace").decode() for text in (question, answer)]
        with self._writing() as base:
            base.execute(
                "INSERT OR IGNORE INTO items (id, question, answer, place) SELECT ?, ?, ?, COUNT(*) FROM items",
                (item, *texts),
            )
        return item

    def take(self, rater: str) -> Item | None:
        """The oldest item that this person can still rate, held for them; None if there is none."""
        now = self._clock()
        with self._writing() as base:
            row = base.execute(
                "SELECT id, question, answer FROM items WHERE (holder = ? OR held_until <= ?)"
                " AND (SELECT COUNT(*) FROM ratings WHERE item = id) < ?"
                " AND NOT EXISTS (SELECT 1 FROM ratings WHERE item = id AND rater = ?) ORDER BY place LIMIT 1",
                (rater, now, self.raters_each, rater),
            ).fetchone()
            if row is not None:
                base.execute("UPDATE items SET holder = ?, held_until = ? WHERE id = ?", (rater, now + HELD_S, row[0]))
        return None if row is None else Item(*row)

    def rate(self, item: str, rater: str, score: int, note: str = "") -> None:
        """Store a person's rating. Rating again replaces it. It is on disk when this returns."""
        if isinstance(score, bool) or not isinstance(score, int) or not 0 <= score <= TOP:
            raise ConfigError(f"a rating is a whole number from 0 to {TOP}, not {score!r}")
        if not rater.strip():
            raise ConfigError("a rating needs the name of its rater")
        with self._writing() as base:
            changed = base.execute("UPDATE items SET holder = '', held_until = 0 WHERE id = ?", (item,)).rowcount
            if not changed:
                raise ConfigError(f"there is no item {item!r:.80} in {self.file}")
            base.execute("INSERT OR REPLACE INTO ratings VALUES (?, ?, ?, ?)", (item, rater, score, note[:1000]))

    def graded(self, item: str) -> Grade:
        """The mean rating, divided by `TOP`; undecided until enough people have rated."""
        with self._open() as base:
            scores = [row[0] for row in base.execute("SELECT score FROM ratings WHERE item = ?", (item,))]
        if len(scores) < self.raters_each:
            return undecided(f"{len(scores)} of {self.raters_each} people have rated")
        return partly(sum(scores) / len(scores) / TOP, f"{len(scores)} people rated")

    def standing(self) -> RatingProgress:
        """The progress of the queue, and how much the raters agree."""
        with self._open() as base:
            (items,) = base.execute("SELECT COUNT(*) FROM items").fetchone()
            rows = base.execute("SELECT item, rater, score FROM ratings ORDER BY item, rater").fetchall()
        by_rater: dict[str, dict[str, bool]] = {}
        for item, rater, score in rows:
            by_rater.setdefault(rater, {})[item] = 2 * score >= TOP
        counts = [sum(item in given for given in by_rater.values()) for item in {row[0] for row in rows}]
        kappas = [
            cohen_kappa([(one[item], other[item]) for item in sorted(shared)])
            for one, other in combinations(by_rater.values(), 2)
            if (shared := one.keys() & other.keys())
        ]
        done = sum(count >= self.raters_each for count in counts)
        return RatingProgress(items, done, len(rows), sum(kappas) / len(kappas) if kappas else None)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=30.0, isolation_level=None)) as base:
            base.execute("PRAGMA journal_mode = WAL")
            base.execute("PRAGMA synchronous = FULL")
            yield base

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the write lock from its start, so that two raters never take one item."""
        with self._open() as base:
            base.execute("BEGIN IMMEDIATE")
            try:
                yield base
                base.execute("COMMIT")
            finally:
                if base.in_transaction:
                    base.execute("ROLLBACK")

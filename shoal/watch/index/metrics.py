"""Lines of metrics in the index: each as it was written, each number of it by its name, and the names for search.

It does not know where lines come from, or whether a host may be believed: `reading` limits and checks them.
"""

import json
import sqlite3
from collections.abc import Sequence

from shoal.metrics import meaning_of
from shoal.watch.index.schema import METRIC, run_word
from shoal.watch.index.sqlite_values import fit_for_search, numbers_of, plain, query_of
from shoal.watch.reading.source import Value, step_of


class MetricsIndex:
    """The metrics of one run in the index."""

    def __init__(self, db: sqlite3.Connection, run: int) -> None:
        self._db, self._run = db, run
        self._named = set[str]()
        """Metrics that full text knows; empty until it was asked."""

    def take(self, lines: Sequence[dict[str, Value]]) -> None:
        """Write lines, in one transaction. A line takes the place of another of the same step."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for line in lines:
                step, told = plain(step_of(line)), plain(json.dumps(line))
                asked = self._db.execute("SELECT line FROM metrics WHERE run = ? AND step = ?", (self._run, step))
                known = asked.fetchone()
                if known == (told,):
                    continue  # it was indexed before a restart
                for name, _ in numbers_of(json.loads(known[0]) if known else {}):
                    delete = "DELETE FROM series WHERE run = ? AND name = ? AND step = ?"
                    self._db.execute(delete, (self._run, plain(name), step))
                self._db.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", (self._run, step, told))
                for name, value in numbers_of(line):
                    row = (self._run, plain(name), step, plain(value))
                    self._db.execute("INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?)", row)
                    self._name(name)

    def _name(self, name: str) -> None:
        """Let full text find a metric by its name and meaning."""
        word = run_word(self._run)
        if not self._named:
            known = self._db.execute("SELECT ref FROM words WHERE words MATCH ?", (query_of("", METRIC, word),))
            self._named = {ref for (ref,) in known}
        if name not in self._named:
            self._named.add(name)
            told = meaning_of(name)
            text = fit_for_search(f"{name} {told.sentence if told else ''}")
            insert = "INSERT INTO words (run, text, what, ref) VALUES (?, ?, 'metric', ?)"
            self._db.execute(insert, (f"{word} {METRIC}", text, plain(name)))

"""The index's database: its tables, how it is opened, and the form of values in it.

It is made from runs and can be made again, so one of another version is deleted. Every table has `run`, the number of a run
in `runs`.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, StateError
from shoal.ledger.errors import FAULTS
from shoal.run_folder import held

VERSION = 11
"""Of the tables. Another one makes the index anew."""

MOST_ROLLOUTS = 4096
"""A rollout's number is its group's number times this, plus its place in the group. So a text leads to its group."""

TABLES = """
CREATE TABLE runs (run INTEGER PRIMARY KEY, place TEXT UNIQUE, id TEXT, name TEXT, seq INTEGER, head TEXT);
CREATE TABLE facts (run INTEGER PRIMARY KEY, seq INTEGER, told TEXT);
CREATE TABLE conditions (run INTEGER PRIMARY KEY, told TEXT, is_live INTEGER, asked_s REAL, since_s REAL);
CREATE TABLE events (run INTEGER, seq INTEGER, time_s REAL, kind TEXT, node TEXT, version INTEGER, words TEXT, hash TEXT,
  PRIMARY KEY (run, seq)) WITHOUT ROWID;
CREATE INDEX events_by_kind ON events (run, kind, seq);
CREATE INDEX events_by_node ON events (run, node, seq);
CREATE TABLE metrics (run INTEGER, step INTEGER, line TEXT, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE series (run INTEGER, name TEXT, step INTEGER, value REAL, PRIMARY KEY (run, name, step)) WITHOUT ROWID;
CREATE TABLE nodes (run INTEGER, key TEXT, place INTEGER, name TEXT, role TEXT, standing TEXT, credits INTEGER,
  vested INTEGER, accepted INTEGER, refused INTEGER, lapsed INTEGER, leases INTEGER, stale INTEGER, given INTEGER,
  unfilled INTEGER, influence REAL, away INTEGER, reasons TEXT, last_reason TEXT, implementation TEXT, dtype TEXT,
  device TEXT, pace_s REAL, is_slow INTEGER, note TEXT, PRIMARY KEY (run, key)) WITHOUT ROWID;
CREATE INDEX nodes_by_credits ON nodes (run, role, credits);
CREATE TABLE versions (run INTEGER, version INTEGER, seq INTEGER, time_s REAL, root TEXT, manifest TEXT, retired INTEGER,
  signal INTEGER, flat INTEGER, continued INTEGER, void INTEGER, batch_seq INTEGER, batch_s REAL, batch_groups INTEGER,
  PRIMARY KEY (run, version)) WITHOUT ROWID;
CREATE TABLE spread (run INTEGER, version INTEGER, worker TEXT, seq INTEGER, time_s REAL, leases INTEGER, blocks INTEGER,
  PRIMARY KEY (run, version, worker)) WITHOUT ROWID;
CREATE INDEX spread_by_worker ON spread (run, worker, version);
CREATE TABLE verdicts (run INTEGER, seq INTEGER, time_s REAL, validator TEXT, submission TEXT, worker TEXT,
  version INTEGER, groups INTEGER, audited INTEGER, accept INTEGER, void INTEGER, soft INTEGER, hard INTEGER,
  differs_from TEXT, outcomes TEXT, first_seq INTEGER, PRIMARY KEY (run, seq)) WITHOUT ROWID;
CREATE INDEX verdicts_by_submission ON verdicts (run, submission);
CREATE INDEX verdicts_by_validator ON verdicts (run, validator, seq);
CREATE TABLE refusals (run INTEGER, seq INTEGER, place INTEGER, time_s REAL, validator TEXT, submission TEXT,
  worker TEXT, version INTEGER, slot INTEGER, outcome TEXT, "check" TEXT, reason TEXT, rollout INTEGER,
  position INTEGER, figure REAL, bound REAL, PRIMARY KEY (run, seq, place)) WITHOUT ROWID;
CREATE INDEX refusals_by_check ON refusals (run, "check", reason, seq);
CREATE INDEX refusals_by_worker ON refusals (run, worker, seq);
CREATE TABLE groups (id INTEGER PRIMARY KEY, run INTEGER, submission TEXT, place INTEGER, version INTEGER, slot INTEGER,
  digest TEXT, worker TEXT, received_seq INTEGER, received_s REAL, seq INTEGER, status TEXT, public INTEGER, step INTEGER,
  tokens INTEGER, reward REAL, spread REAL, faults INTEGER, env TEXT, task INTEGER, UNIQUE (run, submission, place));
CREATE INDEX groups_by_slot ON groups (run, version, slot);
CREATE INDEX groups_by_worker ON groups (run, worker, id);
CREATE INDEX groups_by_task ON groups (run, env, task, version);
CREATE INDEX groups_by_status ON groups (run, status, id);
CREATE INDEX groups_by_step ON groups (run, step);
CREATE INDEX groups_by_seq ON groups (run, seq);
CREATE TABLE rollouts (id INTEGER PRIMARY KEY, run INTEGER, reward REAL, advantage REAL, failed INTEGER, ending TEXT,
  tokens INTEGER, policy_tokens INTEGER, logprob REAL, turns INTEGER, flaw TEXT);
CREATE TABLE bodies (run INTEGER, submission TEXT, seq INTEGER, state TEXT, why TEXT, PRIMARY KEY (run, submission))
  WITHOUT ROWID;
CREATE INDEX bodies_by_state ON bodies (run, state, seq);
CREATE TABLE heldout (run INTEGER, name TEXT, env TEXT, version INTEGER, mean REAL, low95 REAL, high95 REAL,
  episodes INTEGER, faults INTEGER, measure TEXT, tasks TEXT, judge REAL, judge_low95 REAL, judge_high95 REAL,
  PRIMARY KEY (run, name, env)) WITHOUT ROWID;
CREATE TABLE alarms (run INTEGER, cause TEXT, node TEXT, since_step INTEGER, level TEXT, words TEXT, first_s REAL,
  last_s REAL, is_open INTEGER, evidence TEXT, PRIMARY KEY (run, cause, node, since_step)) WITHOUT ROWID;
CREATE VIRTUAL TABLE texts USING fts5 (run, text, tokenize = 'unicode61');
CREATE VIRTUAL TABLE words USING fts5 (run, text, what UNINDEXED, ref UNINDEXED, tokenize = 'unicode61');
"""

LOCKED_S = 60.0
"""How long to wait for another thread or process that changes an index. To forget a large run takes many seconds."""

SIDECARS = ("-wal", "-shm")
"""Files that SQLite keeps beside an index: its journal and its shared memory."""

NAMES = (
    "facts", "conditions", "events", "metrics", "series", "nodes", "versions", "spread", "verdicts", "refusals", "groups",
    "rollouts", "bodies", "heldout", "alarms",
)  # fmt: skip
"""All tables with rows of a run, but `runs` and those of full text."""


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open an index, and make it where there is none. One that is damaged or of another version is made anew.

    Raises `StateError` if the disk cannot take it.
    """
    try:
        # guard: index-is-made-once
        with held(path.with_name(path.name + "-lock")):
            return _made(path)
    except OSError as error:
        raise StateError(f"cannot make the index {path}: {error}. Free some space, or give another place") from None


def _made(path: Path) -> sqlite3.Connection:
    """As `open_to_write`, which calls it while nobody else makes the index. Raises `OSError`, too."""
    if not path.exists():
        # Readers in this process may still map the shared memory of a deleted index, and SQLite would truncate it.
        _delete(path, SIDECARS)  # guard: no-memory-of-a-deleted-index
    for _ in range(2):
        try:
            if (found := _opened(path)) is not None:
                return found
        except sqlite3.DatabaseError as error:
            # guard: locked-index-is-not-deleted
            if not getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise StateError(
                    f"cannot open the index {path}: {error}. Free some space, or give another place"
                ) from None
        _delete(path, ("", *SIDECARS))
    raise StateError(f"cannot make the index {path}: check that its folder is writable and that its disk has room")


def _delete(path: Path, parts: Sequence[str]) -> None:
    for part in parts:
        path.with_name(path.name + part).unlink(missing_ok=True)


def _opened(path: Path) -> sqlite3.Connection | None:
    """The index in a file, if it is of this version; made if the file is new."""
    connection = sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version={VERSION}; COMMIT;")
            version = VERSION
        if version == VERSION:
            return connection
    except sqlite3.DatabaseError:
        connection.close()
        raise
    connection.close()
    return None


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open an index for questions. Raises `StateError` if there is none."""
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0, check_same_thread=False
        )
        if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            connection.row_factory = sqlite3.Row
            return connection
        connection.close()
    except sqlite3.DatabaseError as error:
        raise StateError(f"the index {path} cannot be read: {error}. Start the process that builds it") from None
    raise StateError(f"the index {path} is of another version: start the process that builds it")


def begun(connection: sqlite3.Connection, place: str) -> tuple[int, str, int, str]:
    """A run's number in the index, which it is given if it has none; its id, and number and hash of its newest event."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "INSERT INTO runs (place, id, name, seq, head) VALUES (?, '', '', -1, '') ON CONFLICT DO NOTHING", (place,)
        )
    asked = connection.execute("SELECT run, id, seq, head FROM runs WHERE place = ?", (place,))
    known: tuple[int, str, int, str] = asked.fetchone()
    return known


def forget(connection: sqlite3.Connection, run: int) -> None:
    """Delete all rows of a run, but its number. Call within a transaction."""
    connection.execute("DELETE FROM texts WHERE rowid IN (SELECT id FROM rollouts WHERE run = ?)", (run,))
    connection.execute("DELETE FROM words WHERE words MATCH ?", (f"run : {run_word(run)}",))
    for name in NAMES:
        connection.execute(f"DELETE FROM {name} WHERE run = ?", (run,))
    connection.execute("UPDATE runs SET id = '', name = '', seq = -1, head = '' WHERE run = ?", (run,))


METRIC = "metric"
"""Beside the word of its run, marks the names of metrics in full text."""


def run_word(run: int) -> str:
    """The word by which full text finds the rows of a run."""
    return f"run{run}"


# --- What keeps an index from being built, as an error with a sentence ---


@contextmanager
def told_as_errors(run: str) -> Iterator[None]:
    """Turn a fault of the disk or of a stranger's run into a `StateError` with a sentence."""
    try:
        yield
    except ShoalError:
        raise
    except sqlite3.IntegrityError:
        raise StateError(
            f"another process has written what this one read of {run} into the same index: give one of them another place"
        ) from None
    except sqlite3.Error as error:
        busy = getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY")
        remedy = "Stop the other process that writes to it" if busy else "Free some space"
        # guard: full-disk-is-told
        raise StateError(f"the index cannot be written: {error}. {remedy}, or give another place") from None
    except OverflowError:
        raise StateError(f"the run {run} has larger numbers than a run can have: do not trust it") from None
    except (*FAULTS, RecursionError) as fault:
        # guard: odd-events-are-told
        raise StateError(
            f"the run {run} holds what no shoal writes ({type(fault).__name__}: {str(fault)[:100]}): do not trust it"
        ) from fault


# --- Values of strangers as SQLite and its full text take them ---

LARGEST = (1 << 63) - 1
"""SQLite has no larger integers; a log of strangers may."""

MOST_WORDS = 20
"""Of a search."""

MAX_SEARCHED_CHARS = 50_000
"""Characters of a text that a search covers."""


def plain(value: Any) -> Any:
    """A value that SQLite stores: no number out of its range, and no lone surrogate."""
    if isinstance(value, int):
        return int(value) if abs(value) <= LARGEST else math.copysign(LARGEST, value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value


def fit_for_search(text: str) -> str:
    """A text as full text stores it: without NUL, where SQLite would end, and not longer than is useful."""
    return str(plain(text[:MAX_SEARCHED_CHARS].replace("\0", " ")))


def values_of(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a line by name; those of a table within it by NAME/KEY."""
    for name, value in line.items():
        for inner, part in value.items() if isinstance(value, dict) else [("", value)]:
            yield f"{name}/{inner}" if inner else name, part


def numbers_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Like `values_of`, but only numbers."""
    for name, value in values_of(line):
        if isinstance(value, int | float):
            yield name, float(value)


def query_of(typed: str, *marks: str) -> str:
    """What a person typed as a query of full text: all of the words, in rows with all of these marks, such as a run's.

    A word that ends with * is a beginning. Nothing else that was typed is an operator.
    """
    words = [word for word in fit_for_search(typed).split() if word.strip("*")][:MOST_WORDS]
    asked = [f'"{word.rstrip("*").replace(chr(34), chr(34) * 2)}"' + "*" * word.endswith("*") for word in words]
    return " AND ".join([*(f"run : {mark}" for mark in marks), *(f"text : {word}" for word in asked)])

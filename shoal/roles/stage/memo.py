"""What the stage has answered, kept so that the same turns always get the same answers.

Called by `turns`. A rollout's path names it by all turns of the policy so far. To each path there is one reply, and it is
on the disk before anyone reads it. So a worker that takes a block over hears what the first one heard, and an episode whose
process was killed is played again from the policy's turns. It knows no environment and no network.
"""

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import StateError
from shoal.protocol.types import ENVIRONMENT, Outcome
from shoal.protocol.wire import domain_hash

PATH_BYTES = 32

_TABLES = """
CREATE TABLE IF NOT EXISTS replies (
    path BLOB PRIMARY KEY, parent BLOB NOT NULL, written BLOB NOT NULL, words BLOB NOT NULL, room INTEGER NOT NULL,
    ending TEXT NOT NULL, reward REAL NOT NULL, author INTEGER NOT NULL, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    lease TEXT, block INTEGER, turn INTEGER, digest TEXT NOT NULL, paths BLOB NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (lease, block, turn)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS replies_by_version ON replies (version);
"""


class Reply(NamedTuple):
    """What the environment answers a turn of the policy, or how it opens."""

    words: bytes
    """Token ids, int32."""
    room: int
    """Tokens that the policy may write next; 0 after the end."""
    ending: Outcome
    reward: float
    """Of the whole rollout; it counts once the rollout has ended."""
    author: int
    """Author of the policy's turn, as the rollout names it."""


class Step(NamedTuple):
    """A reply with its place: after `written` at `parent`."""

    path: bytes
    parent: bytes
    """Empty for an opening."""
    written: bytes
    reply: Reply


class Taken(NamedTuple):
    """A turn that a lease has taken."""

    digest: str
    """Of the turn."""
    paths: tuple[bytes, ...]
    """Of all rollouts of the block after the turn, those that have ended included."""


def opening_path(version: int, slot: int, index: int, lease: str = "") -> bytes:
    """The path of a rollout's opening. With a lease, no other lease shares its replies."""
    where = [version.to_bytes(8, "big"), slot.to_bytes(8, "big"), index.to_bytes(8, "big")]
    return domain_hash("stage", *where, lease.encode())


def next_path(path: bytes, written: bytes) -> bytes:
    """The path after one more turn of the policy."""
    return domain_hash("stage/turn", path, written)


class Memo:
    """The replies of a run, in a SQLite file. Threads may share it."""

    def __init__(self, file: Path) -> None:
        """Raises `StateError` if the file cannot be used."""
        self._file, self._lock = file, threading.Lock()
        try:
            self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")  # a reply that was read is on the disk
            self._database.executescript(_TABLES)
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        self._database.close()

    def replies(self, paths: Iterable[bytes]) -> dict[bytes, Reply]:
        """The replies that are known, by path."""
        found: dict[bytes, Reply] = {}
        for path in dict.fromkeys(paths):
            for row in self._read("SELECT words, room, ending, reward, author FROM replies WHERE path = ?", path):
                found[path] = Reply(*row)
        return found

    def taken(self, lease: str, block: int, turn: int) -> Taken | None:
        """A turn that a lease has taken; None before that."""
        where = (lease, block, turn)
        rows = self._read("SELECT digest, paths FROM turns WHERE lease = ? AND block = ? AND turn = ?", *where)
        return next((Taken(digest, _split(paths)) for digest, paths in rows), None)

    def last(self, lease: str, block: int) -> Taken | None:
        """The newest turn that a lease has taken in a block."""
        query = "SELECT digest, paths FROM turns WHERE lease = ? AND block = ? ORDER BY turn DESC LIMIT 1"
        return next((Taken(digest, _split(paths)) for digest, paths in self._read(query, lease, block)), None)

    def story(self, path: bytes) -> list[Step]:
        """All steps from the opening to a path."""
        steps: list[Step] = []
        while path:
            query = "SELECT parent, written, words, room, ending, reward, author FROM replies WHERE path = ?"
            parent, written, *reply = self._read(query, path)[0]
            steps.append(Step(path, parent, written, Reply(*reply)))
            path = parent
        return steps[::-1]

    def rollout(self, path: bytes) -> tuple[bytes, bytes, Reply]:
        """Token ids and authors of a rollout, and its last reply."""
        tokens, author = bytearray(), bytearray()
        for step in (steps := self.story(path)):
            tokens += step.written + step.reply.words
            author += bytes([step.reply.author]) * (len(step.written) // 4)
            author += bytes([ENVIRONMENT]) * (len(step.reply.words) // 4)
        return bytes(tokens), bytes(author), steps[-1].reply

    def keep(
        self, lease: str, version: int, block: int, turn: int, taken: Taken, steps: Sequence[Step]
    ) -> dict[bytes, Reply]:
        """Book a turn with its new replies, all or nothing; returns the replies that hold. Of two for one path, the first
        holds. Raises `StateError` if the disk is full."""
        rows = [(step.path, step.parent, step.written, *step.reply, version) for step in steps]
        booked = (lease, block, turn, taken.digest, b"".join(taken.paths), version)
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN IMMEDIATE")
                # guard: first-reply-holds
                self._database.executemany("INSERT OR IGNORE INTO replies VALUES (?,?,?,?,?,?,?,?,?)", rows)
                self._database.execute("INSERT INTO turns VALUES (?,?,?,?,?,?)", booked)
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        return self.replies(step.path for step in steps)

    def forget(self, before: int) -> None:
        """Delete all of older versions."""
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for table in ("replies", "turns"):
                    self._database.execute(f"DELETE FROM {table} WHERE version < ?", (before,))
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: sqlite3.Error) -> StateError:
        return StateError(
            f"the stage's memory {self._file} cannot be used: {error}. Check the disk and the permissions"
        )


def _split(paths: bytes) -> tuple[bytes, ...]:
    return tuple(paths[i : i + PATH_BYTES] for i in range(0, len(paths), PATH_BYTES))

"""What the stage has answered, kept so that the same turns always get the same answers.

A rollout's path names it by all turns of the policy so far. Each path has one reply, which is on the disk before anyone
reads it. So a worker that takes over a block gets the same replies as the first one, and an episode whose process was
killed is played again from the policy's turns. It does not deal with environments or the network.
"""

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import msgspec

from shoal.errors import StateError
from shoal.protocol.encoding import domain_hash
from shoal.protocol.messages import ENVIRONMENT, Outcome

PATH_BYTES = 32

_TABLES = """
CREATE TABLE IF NOT EXISTS replies (
    path BLOB PRIMARY KEY, parent BLOB NOT NULL, written BLOB NOT NULL, words BLOB NOT NULL, room INTEGER NOT NULL,
    ending TEXT NOT NULL, reward REAL NOT NULL, author INTEGER NOT NULL, row INTEGER NOT NULL, beside INTEGER NOT NULL,
    fault TEXT NOT NULL, outside REAL, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    lease TEXT, block INTEGER, turn INTEGER, digest TEXT NOT NULL, paths BLOB NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (lease, block, turn)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS judged (
    name BLOB PRIMARY KEY, scores BLOB NOT NULL, version INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS replies_by_version ON replies (version);
CREATE INDEX IF NOT EXISTS turns_by_version ON turns (version);
CREATE INDEX IF NOT EXISTS judged_by_version ON judged (version);
"""

_KEYS = {"replies": "path", "turns": "lease, block, turn", "judged": "name"}

_FORGOTTEN_AT_ONCE = 2000
"""Rows that are deleted before the next turn may be booked."""


Change: TypeAlias = tuple[str, Sequence[Sequence[object]]]
"""A statement, and the rows to execute it with."""

_REPLY = "words, room, ending, reward, author, row, beside, fault, outside"


class FinalScore(NamedTuple):
    """What a rollout earns in the end."""

    reward: float
    fault: str = ""
    """What the environment raised, if the rollout counts in nothing because of it; else empty."""
    outside: float | None = None
    """Its score, if that is outside the environment's bounds."""


class Reply(NamedTuple):
    """What the environment answers a turn of the policy, or how it opens."""

    words: bytes
    """Token ids, int32."""
    room: int
    """Tokens that the policy may write next; 0 after the end."""
    ending: Outcome
    reward: float
    """Reward of the whole rollout. It counts once the rollout has ended."""
    author: int
    """Author of the policy's turn, as the rollout names it."""
    row: int = 0
    """Index of the row that contains the words, and that the next turn continues."""
    beside: bool = False
    """Whether the environment compares the rollout with its siblings, so that `reward` is not final."""
    fault: str = ""
    """As in `FinalScore`, and so is the next."""
    outside: float | None = None

    @property
    def score(self) -> FinalScore:
        """What the rollout earns, if it is not compared with its siblings."""
        return FinalScore(self.reward, self.fault, self.outside)


class RolloutSoFar(NamedTuple):
    """A rollout so far."""

    token_ids: bytes
    author: bytes
    starts: tuple[int, ...]
    """Where each row after the first begins."""
    last: Reply


class PlacedReply(NamedTuple):
    """A reply with its place: after `written` at `parent`."""

    path: bytes
    parent: bytes
    """Empty for an opening."""
    written: bytes
    reply: Reply


class Taken(NamedTuple):
    """A turn that a lease has taken."""

    digest: str
    """Digest of the turn."""
    paths: tuple[bytes, ...]
    """Paths of all rollouts of the block after the turn, including those that have ended."""


def opening_path(version: int, slot: int, index: int, lease: str = "") -> bytes:
    """The path of a rollout's opening. With a lease, no other lease shares its replies."""
    where = [version.to_bytes(8, "big"), slot.to_bytes(8, "big"), index.to_bytes(8, "big")]
    return domain_hash("stage", *where, lease.encode())


def next_path(path: bytes, written: bytes) -> bytes:
    """The path after one more turn of the policy."""
    return domain_hash("stage/turn", path, written)


def group_name(paths: Sequence[bytes]) -> bytes:
    """The name of a group whose rollouts have ended at these paths."""
    return domain_hash("stage/group", *paths)


class ReplyStore:
    """The replies of a run, in a SQLite file. Threads may share it."""

    def __init__(self, file: Path) -> None:
        """Raises `StateError` if the file cannot be used."""
        self._file, self._lock, self._writing = file, threading.Lock(), threading.Lock()
        self._waiting: SimpleQueue[tuple[Sequence[Change], Future[None]]] = SimpleQueue()
        try:
            self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")  # a reply that was read is on the disk
            self._database.executescript(_TABLES)
            self._reader = sqlite3.connect(
                file, check_same_thread=False, isolation_level=None
            )  # does not wait for writers
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        """Turns at work then raise `StateError`."""
        with self._writing, self._lock:  # guard: closed-between-writes
            self._database.close()
            self._reader.close()

    def replies(self, paths: Iterable[bytes]) -> dict[bytes, Reply]:
        """The replies that are known, by path."""
        found: dict[bytes, Reply] = {}
        for some in batched(dict.fromkeys(paths)):
            places = ",".join("?" * len(some))
            for path, *reply in self._read(f"SELECT path, {_REPLY} FROM replies WHERE path IN ({places})", *some):
                found[path] = _reply(reply)
        return found

    def taken(self, lease: str, block: int, turn: int) -> Taken | None:
        """A turn that a lease has taken; None if it has not taken it yet."""
        where = (lease, block, turn)
        rows = self._read("SELECT digest, paths FROM turns WHERE lease = ? AND block = ? AND turn = ?", *where)
        return next((Taken(digest, _split(paths)) for digest, paths in rows), None)

    def last(self, lease: str, block: int) -> Taken | None:
        """The newest turn that a lease has taken in a block."""
        query = "SELECT digest, paths FROM turns WHERE lease = ? AND block = ? ORDER BY turn DESC LIMIT 1"
        return next((Taken(digest, _split(paths)) for digest, paths in self._read(query, lease, block)), None)

    def steps_of(self, path: bytes) -> list[PlacedReply]:
        """All steps from the opening to a path."""
        steps: list[PlacedReply] = []
        while path:
            query = f"SELECT parent, written, {_REPLY} FROM replies WHERE path = ?"
            parent, written, *reply = self._read(query, path)[0]
            steps.append(PlacedReply(path, parent, written, _reply(reply)))
            path = parent
        return steps[::-1]

    def rollout(self, path: bytes) -> RolloutSoFar:
        """A rollout so far, as a worker has it."""
        rows, row = [(bytearray(), bytearray())], 0
        for step in (steps := self.steps_of(path)):
            tokens, author = rows[row]
            tokens += step.written
            author += bytes([step.reply.author]) * (len(step.written) // 4)
            row = step.reply.row
            if row == len(rows):
                rows.append((bytearray(), bytearray()))
            tokens, author = rows[row]
            tokens += step.reply.words
            author += bytes([ENVIRONMENT]) * (len(step.reply.words) // 4)
        starts = tuple(accumulate(len(author) for _, author in rows[:-1]))
        token_ids, authors = (b"".join(parts) for parts in zip(*rows, strict=True))
        return RolloutSoFar(token_ids, authors, starts, steps[-1].reply)

    def judged(self, name: bytes) -> tuple[FinalScore, ...]:
        """What the rollouts of a group earn when compared; nothing if they were not compared yet."""
        for (scores,) in self._read("SELECT scores FROM judged WHERE name = ?", name):
            return msgspec.msgpack.decode(scores, type=tuple[FinalScore, ...])
        return ()

    def judge(self, name: bytes, version: int, scores: Sequence[FinalScore]) -> tuple[FinalScore, ...]:
        """Book what the rollouts of a group earn when compared. Returns what holds: the first that was booked."""
        booked = (name, msgspec.msgpack.encode(scores), version)
        self._write(("INSERT OR IGNORE INTO judged VALUES (?,?,?)", [booked]))
        return self.judged(name)

    def keep(
        self, lease: str, version: int, block: int, turn: int, taken: Taken, steps: Sequence[PlacedReply]
    ) -> dict[bytes, Reply]:
        """Book a turn with its new replies, all or nothing; returns the replies that hold. Of two for one path, the first
        holds. Raises `StateError` if the disk is full."""
        rows = [(step.path, step.parent, step.written, *step.reply, version) for step in steps]
        booked = (lease, block, turn, taken.digest, b"".join(taken.paths), version)
        # guard: first-reply-holds
        self._write(
            ("INSERT OR IGNORE INTO replies VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", rows),
            ("INSERT INTO turns VALUES (?,?,?,?,?,?)", [booked]),
        )
        return self.replies(step.path for step in steps)

    def forget(self, before: int) -> None:
        """Delete everything of older versions, little by little. It may take seconds: call it in a thread."""
        for table, key in _KEYS.items():
            old = f"FROM {table} WHERE version < ?"
            some = f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} {old} LIMIT {_FORGOTTEN_AT_ONCE})"
            while self._read(f"SELECT 1 {old} LIMIT 1", before):
                self._write((some, [(before,)]))

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _write(self, *changes: Change) -> None:
        """Change all or nothing. What waits for the disk at the same time is written together."""
        mine: Future[None] = Future()
        self._waiting.put((changes, mine))
        with self._writing:
            together = [self._waiting.get() for _ in range(self._waiting.qsize())]
            try:
                self._commit([change for each, _ in together for change in each])
            except Exception:  # noqa: BLE001  what is wrong with one must not keep the others waiting
                for each, done in together:
                    self._commit_alone(each, done)
            else:
                for _, done in together:
                    done.set_result(None)
        mine.result()

    def _commit_alone(self, changes: Sequence[Change], done: "Future[None]") -> None:
        try:
            self._commit(changes)
        except sqlite3.Error as error:
            done.set_exception(self._unusable(error))
        except Exception as error:  # noqa: BLE001  such as a number that SQLite has no room for
            done.set_exception(error)
        else:
            done.set_result(None)

    def _commit(self, changes: Sequence[Change]) -> None:
        if changes:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for query, rows in changes:
                    self._database.executemany(query, rows)

    def _unusable(self, error: sqlite3.Error) -> StateError:
        return StateError(
            f"the stage's memory {self._file} cannot be used: {error}. Check the disk and the permissions"
        )


def _reply(row: Sequence[Any]) -> Reply:
    words, room, ending, reward, author, place, beside, fault, outside = row
    return Reply(words, room, ending, reward, author, place, bool(beside), fault, outside)


def batched(paths: Iterable[bytes]) -> Iterator[list[bytes]]:
    """As many at a time as SQLite takes in one question."""
    left = iter(paths)
    while some := list(islice(left, 500)):
        yield some


def _split(paths: bytes) -> tuple[bytes, ...]:
    return tuple(paths[i : i + PATH_BYTES] for i in range(0, len(paths), PATH_BYTES))

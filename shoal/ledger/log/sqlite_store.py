"""Where a log's bytes are stored: an append-only table in a SQLite file, in WAL mode.

Only `log/writer` appends; auditors and the launcher read. It does not look inside events: it keeps bytes, their numbers
and their hashes, and says "stored" only after the database has committed. The queries are SQLAlchemy's, so another
database would be possible, but every command opens SQLite, and only SQLite is tested.
"""

import os
import sqlite3
from collections.abc import Generator, Iterable
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from shoal.errors import StateError, cause_of
from shoal.ledger.event import Entry
from shoal.run_folder import free_below

_metadata = sa.MetaData()
_events = sa.Table(
    "events",
    _metadata,
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
)
_RAW = [sa.type_coerce(column, sa.types.NullType()) for column in (_events.c.data, _events.c.hash)]
"""What a row holds, unconverted: a damaged one may hold anything, and conversion would fail with anything."""
READ_ROWS = 2000
"""Rows fetched at a time."""


class Store:
    """An open log. One process may append; any number may read."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        """Open a log, and make it where there is none. One opened `read_only` is neither made nor changed."""
        sqlite = url.startswith("sqlite")
        self._name = (sa.make_url(url).database if sqlite else None) or url
        file, wait_s = self._name, 5.0

        def existing() -> sqlite3.Connection:  # SQLite makes a file that is not there, unless told otherwise
            where = f"file://{quote(os.fsencode(os.path.abspath(file)))}?mode=rw"
            return sqlite3.connect(where, timeout=wait_s, check_same_thread=False, uri=True)

        if sqlite and read_only:  # guard: reader-makes-no-file
            self._engine = sa.create_engine(url, creator=existing)
        else:
            self._engine = sa.create_engine(url, connect_args={"timeout": wait_s} if sqlite else {})
        if read_only:  # guard: reader-makes-no-log
            return
        if sqlite:
            sa.event.listen(self._engine, "connect", _durable_sqlite)
        try:
            _metadata.create_all(self._engine)
        except sa.exc.SQLAlchemyError as error:
            if _name_of(error).startswith(_DAMAGE + _NO_ROOM):
                raise self._unread(error) from None
            raise StateError(f"cannot open the log at {url}: {_reason(error)}") from None

    def append(self, entries: Iterable[Entry]) -> None:
        """Store entries in one transaction; returns after the commit.

        Raises `StateError` if they could not be stored, in which case none was.
        """
        rows = [{"seq": e.seq, "data": e.data, "hash": e.hash} for e in entries]
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(_events), rows)
        except sa.exc.SQLAlchemyError as error:
            raise StateError(f"the log could not be written: {_reason(error)}; nothing was lost") from None

    def read(
        self, after: int = -1, limit: int | None = None, at_a_time: int = READ_ROWS
    ) -> Generator[tuple[bytes, str]]:
        """Stored bytes and hashes with a sequence number above `after`, in order. `at_a_time` rows are in memory together.

        Raises `StateError` if the log is damaged or cannot be read.
        """
        query = sa.select(*_RAW).where(_events.c.seq > after).order_by(_events.c.seq)
        try:
            with self._engine.connect() as connection:
                rows = connection.execution_options(yield_per=at_a_time).execute(query.limit(limit) if limit else query)
                for row in rows:
                    data, stored_hash = row[0], row[1]
                    # guard: damaged-row
                    if not isinstance(data, bytes | memoryview) or not isinstance(stored_hash, str):
                        raise self._unreadable("a row of it is not an event. Ask for the log elsewhere")
                    yield bytes(data), stored_hash
        except sa.exc.SQLAlchemyError as error:
            if _is_empty(error):
                return
            raise self._unread(error) from None

    def newest(self) -> int:
        """The number of the newest event; -1 if there is none. Raises `StateError`."""
        try:
            with self._engine.connect() as connection:
                found = connection.execute(sa.select(sa.func.max(_events.c.seq))).scalar()
        except sa.exc.SQLAlchemyError as error:
            if _is_empty(error):
                return -1
            raise self._unread(error) from None
        return found if isinstance(found, int) else -1

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def _unread(self, error: sa.exc.SQLAlchemyError) -> StateError:
        if not _name_of(error).startswith(_NO_ROOM):
            return self._unreadable(_reason(error))
        return StateError(  # an older copy in its place would fork the run
            f"the log {self._name} cannot be read now: its reader needs {self._name}-shm, and the disk has no room for it "
            f"({free_below(Path(self._name).parent)} bytes free). Free disk space, or raise the user's limit, or that of "
            "the size of files. The log may be whole: do not replace it"
        )

    def _unreadable(self, reason: str) -> StateError:
        if not Path(self._name).exists():
            return StateError(f"there is no log {self._name}: restore it from a copy, or start the run if it is new")
        return StateError(f"the log {self._name} cannot be read: {reason}, or restore it from a copy")


def sqlite_url(path: Path) -> str:
    """URL of a log kept in a file."""
    return f"sqlite:///{path}"


def _durable_sqlite(connection: sa.engine.interfaces.DBAPIConnection, record: object) -> None:
    """Readers never block the writer, and a commit is on the disk when it returns."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


_DAMAGE, _NO_ROOM = ("SQLITE_CORRUPT", "SQLITE_NOTADB"), ("SQLITE_IOERR_SHM",)
"""How SQLite's names of errors begin: of a damaged file, and where no file can be made beside it."""


def _name_of(error: sa.exc.SQLAlchemyError) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlite_errorname", ""))


def _is_empty(error: sa.exc.SQLAlchemyError) -> bool:
    """Whether the file has no table: the coordinator has only begun to make it, or it was emptied."""
    return "no such table" in str(getattr(error, "orig", ""))


def _reason(error: sa.exc.SQLAlchemyError) -> str:
    cause = getattr(error, "orig", None) or error
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_CANTOPEN:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as fault:  # SQLite says only that it cannot open a file
            return cause_of(fault)
    said = (str(cause).splitlines() or [type(cause).__name__])[0]
    return f"{said}. {_REMEDIES.get(code, 'Check the disk, the path and the permissions')}"


_REMEDIES = {
    sqlite3.SQLITE_FULL: "Free disk space",
    sqlite3.SQLITE_READONLY: "Make the file and its folder writable",
    sqlite3.SQLITE_BUSY: "Close the program that holds it",
}

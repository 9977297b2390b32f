"""The log of a run on this machine, event by event, also while its coordinator appends to it."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from shoal.errors import StateError
from shoal.ledger.event import Entry
from shoal.ledger.event_types import read_entry
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.run_events import RunCreated
from shoal.protocol.encoding import WireError


class LogFollower:
    """Gives each event of a log once. Raises `StateError` if the log is damaged or cannot be read."""

    def __init__(self, path: Path, seq: int = -1) -> None:
        self.path, self.seq = path, seq
        """The file, and the number of the newest event that was given."""

    def events(self, limit: int | None = None, having: Sequence[bytes] = ()) -> Iterator[Entry]:
        """The next events, at most `limit`; of a log that is long, only those whose bytes hold one of `having`."""
        with closing(Store(sqlite_url(self.path), read_only=True)) as store:
            for data, _ in store.read(self.seq, limit):
                if having and not any(part in data for part in having):
                    self.seq += 1
                    continue
                try:
                    entry, _ = read_entry(data)
                except WireError as error:
                    raise StateError(f"the log {self.path} is damaged after event {self.seq}: {error}") from None
                self.seq = entry.seq
                yield entry

    def skip_to_newest(self, but: int) -> None:
        """Go on `but` so many events before the newest: a long log is not read from its beginning."""
        self.seq = max(self.seq, newest_event(self.path) - but)


def newest_event(path: Path) -> int:
    """The number of the newest event; -1 if there is none. Raises `StateError`."""
    with closing(Store(sqlite_url(path), read_only=True)) as store:
        return store.newest()


def creation_of(path: Path) -> RunCreated:
    """How the run of this log was created: what all its nodes agree on. Raises `StateError` also if the log is empty."""
    for entry in LogFollower(path).events(1):
        assert isinstance(entry.body, RunCreated), "a log begins with the run"
        return entry.body
    raise StateError(f"the log {path} is empty")

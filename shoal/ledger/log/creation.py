"""The first event of a log: what all nodes of the run agree on.

Called by roles of the host's machine that need no more of the log. They read the file and never write it.
"""

from pathlib import Path

from shoal.errors import StateError
from shoal.ledger.facts.run import RunCreated
from shoal.ledger.log.store import Store, sqlite_url
from shoal.ledger.table import read_entry


def creation_of(log: Path) -> RunCreated:
    """How the run of this log was created. Raises `StateError` if the log is empty or cannot be read."""
    store = Store(sqlite_url(log), read_only=True)
    try:
        for data, _ in store.read(limit=1):
            body = read_entry(data)[0].body
            assert isinstance(body, RunCreated), "a log begins with the run"
            return body
    finally:
        store.close()
    raise StateError(f"the log {log} is empty")

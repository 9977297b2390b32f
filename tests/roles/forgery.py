"""Logs that a lying host might publish: any events, with hashes that fit each other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.ledger.event import GENESIS
from shoal.ledger.event_types import make_entry, read_entry
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.run_folder import RunFolder

Lines = list[tuple[float, Any]]
"""(time, body) of each event."""


def bodies(run_dir: Path) -> Lines:
    """The events of a run's log."""
    store = Store(sqlite_url(RunFolder(run_dir).log))
    entries = [read_entry(data)[0] for data, _ in store.read()]
    store.close()
    return [(entry.time, entry.body) for entry in entries]


def forged(run_dir: Path, into: Path, edit: Callable[[Lines], Lines]) -> Path:
    """A copy of a run with an edited log, in which every hash is computed again. It has no receipts of the workers."""
    shutil.copytree(run_dir, into, ignore=shutil.ignore_patterns("log.sqlite*", "nodes"))
    store, head = Store(sqlite_url(RunFolder(into).log)), GENESIS
    entries = []
    for seq, (time, body) in enumerate(edit(bodies(run_dir))):
        entries.append(make_entry(seq, time, body, head))
        head = entries[-1].hash
    store.append(entries)
    store.close()
    return into

"""Errors of the log's file name the true cause and a remedy that helps."""

import sqlite3

import pytest
import sqlalchemy as sa

from shoal.errors import StateError
from shoal.ledger.event import Entry
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from tests.low_memory import full_disk, no_more_files

ENTRY = Entry(0, 1.0, "", None, b"{}", "0" * 64)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path):
    return Store(sqlite_url(tmp_path / "log.sqlite"))


def test_too_many_open_files_are_not_reported_as_a_full_disk(store):
    store.close()  # so that the next call opens the file again
    with no_more_files(), pytest.raises(StateError) as caught:
        store.append([ENTRY])
    assert "too many files" in str(caught.value) and "disk space" not in str(caught.value)
    store.append([ENTRY])
    assert [row for row, _ in store.read()] == [b"{}"]


def test_a_full_disk_is_reported_as_one(store):
    with store._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()

    def limited(connection: sqlite3.Connection, record: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    store.close()
    sa.event.listen(store._engine, "connect", limited)
    with pytest.raises(StateError, match=r"disk is full\. Free disk space; nothing was lost"):
        store.append([Entry(0, 1.0, "", None, b"x" * 100_000, "0" * 64)])  # type: ignore[arg-type]


def test_a_full_disk_is_no_damage_to_who_reads(store, tmp_path):
    store.append([ENTRY])
    store.close()
    with full_disk(100), pytest.raises(StateError, match=r"cannot be read now.* \(\d+ bytes free\)") as caught:
        store.newest()
    with full_disk(100), pytest.raises(StateError, match=r"cannot be read now"):
        Store(sqlite_url(tmp_path / "log.sqlite"))
    assert "restore" not in str(caught.value) and "do not replace it" in str(caught.value)
    assert store.newest() == 0


def test_a_read_only_log_is_reported_as_one(store):
    with store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = 1")
    with pytest.raises(StateError, match=r"readonly database\. Make the file and its folder writable"):
        store.append([ENTRY])


def test_a_log_that_another_program_locks_is_reported_as_locked(store, tmp_path):
    with store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(tmp_path / "log.sqlite")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateError, match=r"locked\. Close the program that holds it"):
        store.append([ENTRY])
    other.close()

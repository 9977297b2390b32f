"""A damaged log is refused in one line, and reading it does not change it."""

import random
import sqlite3
import subprocess
import sys

import pytest

from shoal.cli import main
from shoal.errors import StateError
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.net.key_files import load_or_make_key
from tests.ledger.ledger_fixture import World

WORKER = "a" * 64
VERIFY = ["ledger", "verify"]
READERS = (VERIFY, ["ledger", "show", "--kind", "credit"], ["credits"], ["audit", "--all"])


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The bytes of an honest log, with its write-ahead file merged into it."""
    world = World(tmp_path_factory.mktemp("honest"), steps=20)
    world.enter(WORKER)
    world.publish()
    for _ in range(8):
        world.serve(WORKER)
        if world.state.main.version in world.state.main.batches:
            world.publish()
    world.log_writer.store.close()
    assert world.path.stat().st_size > 5 * PAGE_BYTES
    return world.path.read_bytes()


PAGE_BYTES = 4096


def executed(statement):
    def change(path):
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()

    return change


def written(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def garbage_in_the_middle(data):
    middle = len(data) // 2 // PAGE_BYTES * PAGE_BYTES
    return data[:middle] + random.Random(0).randbytes(PAGE_BYTES) + data[middle + PAGE_BYTES :]


DAMAGE = {
    "truncated": written(lambda data: data[: len(data) // 2]),
    "garbage in the middle": written(garbage_in_the_middle),
    "no database": written(lambda data: b"this is no database\n" * 1000),
    "zero bytes": written(lambda data: b""),
    "no table": executed("DROP TABLE events"),
    "no events": executed("DELETE FROM events"),
    "other columns": executed("ALTER TABLE events DROP COLUMN hash"),
    "text for bytes": executed("UPDATE events SET data = CAST(data AS TEXT) WHERE seq = 5"),
    "bytes for text": executed("UPDATE events SET hash = x'ff00ff' WHERE seq = 5"),
    "broken text": executed("UPDATE events SET hash = CAST(x'ff0aff' AS TEXT) WHERE seq = 5"),
}


@pytest.mark.parametrize(
    ("reader", "damage"),
    [*((VERIFY, damage) for damage in DAMAGE), *((reader, "garbage in the middle") for reader in READERS[1:])],
)
def test_damaged_log_is_refused_in_one_line_and_left_as_it_is(tmp_path, capsys, log, reader, damage):
    path = tmp_path / "log.sqlite"
    path.write_bytes(log)
    DAMAGE[damage](path)
    found = path.read_bytes()
    assert main.main([*reader, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("error: "), said
    assert "log" in said.err and "None" not in said.err and "a copy" in said.err, said.err
    assert path.read_bytes() == found


@pytest.mark.parametrize("damage", ["zero bytes", "no table", "no events"])
def test_an_empty_log_of_a_run_that_has_begun_is_told_as_one(tmp_path, capsys, log, damage):
    (tmp_path / "log.sqlite").write_bytes(log)
    DAMAGE[damage](tmp_path / "log.sqlite")
    (tmp_path / "trainer").mkdir()
    load_or_make_key(tmp_path / "keys" / "run.key")
    assert main.main(["ledger", "verify", str(tmp_path)]) == 2
    assert "is missing or empty, though the run has begun" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["hash = 'ff'", "data = x'7b7d'", "seq = 999"])
def test_an_edited_log_does_not_hold_and_is_no_error_of_the_reader(tmp_path, capsys, log, change):
    (tmp_path / "log.sqlite").write_bytes(log)
    executed(f"UPDATE events SET {change} WHERE seq = 5")(tmp_path / "log.sqlite")
    assert main.main(["ledger", "verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("FINDING: the log is broken a") and said.out.endswith("\nthe log does NOT hold\n")
    assert said.err == "" and "event" in said.out


def test_damaged_log_gives_no_traceback_on_the_command_line(tmp_path, log):
    (tmp_path / "log.sqlite").write_bytes(log[: len(log) // 2])
    command = [sys.executable, "-m", "shoal.cli.main", "ledger", "verify", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: the log {tmp_path}/log.sqlite cannot be read: database disk image is malformed. Check the disk, the path "
        "and the permissions, or restore it from a copy\n"
    )


@pytest.mark.parametrize("seed", range(20))
def test_any_garbage_in_a_log_gives_a_report_or_one_line(tmp_path, capsys, log, seed):
    """A reader may find that the log holds, because a database file has unused bytes."""
    rng = random.Random(seed)
    data = bytearray(log)
    for _ in range(rng.choice((1, 4, 40))):
        place, size = rng.randrange(len(data)), rng.choice((1, 8, 600))
        data[place : place + size] = rng.randbytes(len(data[place : place + size]))
    (tmp_path / "log.sqlite").write_bytes(data)
    code = main.main(["ledger", "verify", str(tmp_path)])
    said = capsys.readouterr()
    assert (code == 2) == (said.out == "") == (said.err.count("\n") == 1), said


@pytest.mark.parametrize("damage", ["truncated", "garbage in the middle", "no database"])
def test_coordinator_does_not_start_on_a_damaged_log(tmp_path, log, damage):
    path = tmp_path / "log.sqlite"
    path.write_bytes(log)
    DAMAGE[damage](path)
    with pytest.raises(StateError, match=r"cannot be read: .* restore it from a copy"):
        LogWriter(Store(sqlite_url(path)))

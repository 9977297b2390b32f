"""Logs of processes stay small, whatever prints into them, and a full disk stops nothing."""

import errno
import json
import logging
import shutil
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.launch.log_rotation import OLD_LOGS, RETRY_S, LogFile, log_into, named_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.log"


def test_the_log_of_a_process_that_prints_a_lot_stays_small_and_its_end_is_kept(log: Path) -> None:
    files = LogFile(log, most_bytes=1000)
    with log.open("ab", buffering=0) as file:  # as the launcher opens it for a process
        for number in range(500):
            file.write(b"%059d\n" % number)
            files.look(0.0)
    old = [log.with_name(f"{log.name}.{number}") for number in range(OLD_LOGS, 0, -1)]
    assert sorted(log.parent.iterdir()) == sorted([log, *old])
    assert all(path.stat().st_size <= 1060 for path in (log, *old))
    kept = b"".join(path.read_bytes() for path in (*old, log)).split()
    assert kept == [b"%059d" % number for number in range(500 - len(kept), 500)], "no line is missing, and none is torn"


def test_a_log_without_room_for_its_copy_is_left_and_tried_again_later(log: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        tried.append(1)
        raise OSError(errno.ENOSPC, "no space left on device")

    tried: list[int] = []
    files = LogFile(log, most_bytes=100)
    log.write_bytes(b"x" * 500)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        for now in (0.0, 1.0, RETRY_S - 1):
            files.look(now)
        assert len(tried) == 1 and log.stat().st_size == 500 and list(log.parent.iterdir()) == [log]
    files.look(RETRY_S + 1)
    assert log.stat().st_size == 0


def test_a_log_that_is_not_there_yet_is_no_fault(log: Path) -> None:
    LogFile(log).look(0.0)
    assert not log.exists()


def test_a_log_that_a_process_writes_itself_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "launcher.log"
    own, handler = logging.Logger("shoal.launch"), log_into(path, "launcher", "json", most_bytes=1000)
    own.addHandler(handler)
    for number in range(100):
        own.info("step=%d", number)
        handler.close()  # it opens again at the next line
    files = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, OLD_LOGS + 1))]
    assert sorted(path.parent.iterdir()) == files and all(file.stat().st_size <= 1000 for file in files)
    assert json.loads(path.read_text().splitlines()[-1])["fields"] == {"step": 99}


def test_a_log_that_cannot_be_written_is_refused_at_the_start_and_stops_nothing_later(tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError, match=r"--log: cannot write to .*no/here"):
        named_log(tmp_path / "no" / "here", "worker")
    (tmp_path / "logs").write_text("a file where the folder should be")
    own = logging.Logger("shoal.launch")
    own.addHandler(log_into(tmp_path / "logs" / "launcher.log", "launcher", "text"))
    own.info("lost")
    assert capsys.readouterr() == ("", "")

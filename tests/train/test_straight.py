"""A file that is written past the system's cache has the same bytes, whatever the disk can do."""

import errno
import fcntl
import os
import random
import zlib

import pytest

from shoal.train import straight
from shoal.train.straight import StraightFile

MIB = 1 << 20
SIZES = [0, 1, 4096, 4097, MIB - 1, MIB, 3 * MIB + 4097]

needs_straight = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system knows no straight writes")


def no_straight_writes(monkeypatch):
    """As on macOS."""
    monkeypatch.setattr(straight, "_STRAIGHT", 0)


def refused_flag(monkeypatch):
    """As on a file system that knows no straight writes."""
    really = fcntl.fcntl

    def refused(file, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refused)


def large_blocks(monkeypatch):
    """As on a disk whose blocks are larger than a page: the flag is taken, and writes are refused."""
    really = os.write

    def refused(file, data):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(file, data)

    monkeypatch.setattr(os, "write", refused)


def short_writes(step):
    def begin(monkeypatch):
        """As on a disk that takes `step` bytes at most, of a straight file whole blocks only."""
        really = os.write

        def short(file, data):
            if fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
                assert len(data) % 512 == 0 and os.lseek(file, 0, os.SEEK_CUR) % 512 == 0
            return really(file, data[:step])

        monkeypatch.setattr(os, "write", short)

    return begin


DISKS = {
    "any": lambda monkeypatch: None,
    "no straight writes": no_straight_writes,
    "refused flag": refused_flag,
    "large blocks": large_blocks,
    "short by pages": short_writes(64 << 10),
    "short by blocks": short_writes(5 * 512),
}


@needs_straight
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_is_written_whatever_the_disk_can_do(tmp_path, monkeypatch, size, disk):
    data = random.Random(0).randbytes(size)
    DISKS[disk](monkeypatch)
    with StraightFile(tmp_path / "file") as file:
        file.write(data[: size // 3])
        file.write(memoryview(data)[size // 3 :])
    assert (tmp_path / "file").read_bytes() == data
    assert file.crc32 == zlib.crc32(data)


def test_a_file_that_is_there_is_kept(tmp_path):
    (tmp_path / "file").write_bytes(b"here first")
    with pytest.raises(FileExistsError):
        StraightFile(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"here first"


def test_a_file_has_the_rights_that_other_files_have(tmp_path):
    (tmp_path / "other").touch()
    with StraightFile(tmp_path / "file") as file:
        file.write(b"bytes")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_full_disk_is_told_and_the_file_is_closed(tmp_path, monkeypatch, at):
    really, files = os.write, []

    def full(file, data):
        files.append(file)
        if len(files) > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as raised, StraightFile(tmp_path / "file") as file:
        file.write(bytes(2 * MIB + 100))
    assert raised.value.errno == errno.ENOSPC
    assert len(files) == at + 1, "nothing is written after that"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])


def test_an_error_within_leaves_no_open_file(tmp_path):
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(ZeroDivisionError), StraightFile(tmp_path / "file") as file:
        file.write(bytes(MIB + 1))
        raise ZeroDivisionError
    assert len(os.listdir("/dev/fd")) == before


@needs_straight
def test_most_of_a_large_file_is_written_straight_where_the_disk_can(tmp_path, monkeypatch):
    with StraightFile(tmp_path / "probe") as probe:
        if not probe._is_straight:
            pytest.skip("this disk knows no straight writes")
    really, modes = os.write, []

    def watched(file, data):
        modes.append((bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return really(file, data)

    monkeypatch.setattr(os, "write", watched)
    with StraightFile(tmp_path / "file") as file:
        file.write(bytes(2 * MIB + 100))
    assert modes == [(True, MIB), (True, MIB), (False, 100)]

"""Files and folders are whole or absent after a kill or on a full disk, and synced in the order that power loss needs."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.net.blobs import FolderBlobs
from shoal.net.key_files import save_key
from shoal.protocol.signing import Key
from shoal.roles.trainer.publish_version import copy_checkpoint
from shoal.run_folder import held_below, is_url, replaced_folder, write_atomically
from tests.low_memory import full_disk

OPERATIONS = ("fsync", "replace", "rename", "link", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process is gone: from here on it does nothing more."""


def watch(monkeypatch: pytest.MonkeyPatch, kill_at: int = -1) -> list[str]:
    """Operations on files, as they are done; with `kill_at`, that one and all after it are not."""
    done: list[str] = []

    def watched(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            done.append(f"{name} folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else name)
            if 0 <= kill_at < len(done):
                raise Killed
            return operation(*args, **options)

        return run

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    return done


def version(folder: Path, text: str) -> Path:
    """A directory of three files."""
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).write_text(text)
    return folder


def text_of(folder: Path) -> str:
    """What all three files say, or "" where there is no such directory."""
    if not folder.exists():
        return ""
    (text,) = {path.read_text() for path in folder.iterdir()}
    assert len(list(folder.iterdir())) == 3
    return text


@pytest.mark.parametrize("write", [write_atomically, lambda path, data: save_key(path, Key.generate())])
def test_file_is_durable_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    done = watch(monkeypatch)
    write(tmp_path / "file", b"data")
    assert [name for name in done if name not in ("mkdir", "unlink")] in (
        ["fsync", "replace", "fsync folder"], ["fsync", "link", "fsync folder"],
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_blob_is_durable_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = FolderBlobs(tmp_path)
    done = watch(monkeypatch)
    digest = blobs.put(b"data")
    assert done[-6:] == ["mkdir", "fsync folder", "fsync", "replace", "fsync folder", "unlink"]
    assert blobs.get(digest) == b"data" and list((tmp_path / "unfinished").iterdir()) == []


def test_file_that_must_be_new_replaces_nothing(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", b"first", mode=0o600, replace=False)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"second", replace=False)
    assert (tmp_path / "file").read_bytes() == b"first" and stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_file_that_does_not_fit_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", b"first")
    with full_disk(1000), pytest.raises(OSError, match="File too large"):
        write_atomically(tmp_path / "file", b"second" * 1000)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def keep(source: Path, target: Path) -> None:
    """As the trainer does it."""
    copy_checkpoint(source, target)


def write(source: Path, target: Path) -> None:
    """As a policy is saved."""
    with replaced_folder(target) as new:
        for path in source.iterdir():
            shutil.copyfile(path, new / path.name)


@pytest.mark.parametrize("put", [keep, write])
def test_folder_is_durable_before_its_name_and_the_name_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path, Path], None]
) -> None:
    old, new = version(tmp_path / "old", "old"), version(tmp_path / "new", "new")
    put(old, tmp_path / "kept")
    done = watch(monkeypatch)
    put(new, tmp_path / "kept")
    done = done[done.index("fsync") :]
    assert done[:7] == ["fsync", "fsync", "fsync", "fsync folder", "rename", "rename", "fsync folder"]
    assert set(done[7:]) <= {"unlink", "rmdir"}


@pytest.mark.parametrize("put", [keep, write])
def test_a_killed_move_leaves_the_old_folder_the_new_one_or_none_but_never_a_part(
    tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    old, new = version(tmp_path / "old", "old"), version(tmp_path / "new", "new")
    seen, at = [], 0
    while not seen or seen[-1] != "done":
        kept = tmp_path / str(at) / "kept"
        put(old, kept)
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, kill_at=at)
            try:
                put(new, kept)
                seen.append("done")
            except Killed:
                seen.append(text_of(kept))
        put(new, kept)
        assert text_of(kept) == "new"
        assert [path.name for path in kept.parent.iterdir()] == ["kept"]
        at += 1
    assert at > 8 and list(dict.fromkeys(seen)) == ["old", "", "new", "done"]
    assert seen.count("") == 1, "between two renames, and no longer"


def test_the_old_folder_comes_back_if_a_killed_move_left_no_folder_of_the_name(tmp_path: Path) -> None:
    """A writer may fail right after such a kill, for example on a full disk."""
    kept = tmp_path / "kept"
    version(tmp_path / ".kept.old", "old")
    version(tmp_path / ".kept.new", "new")
    with pytest.raises(OSError, match="no space"), replaced_folder(kept):
        raise OSError("no space")
    assert text_of(kept) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_file_of_two_names_counts_once_in_the_size_of_a_folder(tmp_path):
    assert held_below(tmp_path / "absent") == 0
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a").write_bytes(bytes(1000))
    (tmp_path / "b").hardlink_to(tmp_path / "below" / "a")
    (tmp_path / "c").write_bytes(bytes(10))
    assert held_below(tmp_path) == 1010


def test_files_of_a_pattern_do_not_count_in_the_size_of_a_folder_and_may_vanish(tmp_path, monkeypatch):
    for name in ("log.sqlite", "dashboard.sqlite-wal", "weights"):
        (tmp_path / name).write_bytes(bytes(10))
    walked = [(str(tmp_path), [], ["log.sqlite", "dashboard.sqlite-wal", "dashboard.sqlite-shm", "weights", "gone"])]
    monkeypatch.setattr(os, "walk", lambda folder: walked)
    assert held_below(tmp_path, "*.sqlite*") == 10 and held_below(tmp_path) == 30


def test_what_names_a_run_is_a_url_or_a_folder():
    assert all(map(is_url, ("http://host:8470", "https://host", "http:/host")))
    assert not any(map(is_url, ("runs/wordle", "/srv/http://x", "httpd", "", Path("runs/http"))))

"""The trainer keeps a checkpoint whole or not at all, and says so if the disk is full."""

import errno
import os
import shutil

import pytest

from shoal.errors import StateError
from shoal.roles.trainer.publish_version import copy_checkpoint
from tests.low_memory import full_disk


def test_a_full_disk_is_named_when_a_checkpoint_is_kept(tmp_path, monkeypatch):
    """`copytree` collects the errors of all files in one that has no errno and no message of its own."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"weights")

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("_fastcopy_sendfile", "copyfileobj"):
        monkeypatch.setattr(shutil, name, full)
    with pytest.raises(StateError, match=r"cannot write checkpoint .*: .*No space left on device.*\. Free disk space"):
        copy_checkpoint(source, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_half_a_checkpoint_is_removed_and_the_one_before_stays_when_the_disk_is_full(tmp_path):
    kept = tmp_path / "checkpoints" / "final"
    for name, data in (("old", b"old"), ("new", b"new" * 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    copy_checkpoint(tmp_path / "old", kept)
    with full_disk(1000), pytest.raises(StateError, match=r"cannot write checkpoint .*File too large"):
        copy_checkpoint(tmp_path / "new", kept)
    assert [path.name for path in kept.parent.iterdir()] == ["final"]
    assert (kept / "model.safetensors").read_bytes() == b"old"

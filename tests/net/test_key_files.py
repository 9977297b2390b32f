"""Key files: made private, kept private."""

import os
import stat

import pytest

from shoal.errors import StateError
from shoal.net.key_files import load_key, load_or_make_key, save_key
from shoal.protocol.signing import Key


def test_a_key_is_made_once_with_mode_0600_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        key = load_or_make_key(tmp_path / "keys" / "node.key")
    finally:
        os.umask(before)
    path = tmp_path / "keys" / "node.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_make_key(path).public == key.public
    assert [p.name for p in path.parent.iterdir()] == ["node.key"]


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "node.key"
    save_key(path, Key.generate())
    path.chmod(0o640)
    with pytest.raises(StateError, match=r"0640.*chmod 600"):
        load_key(path)


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "node.key"
    first = Key.generate()
    save_key(path, first)
    with pytest.raises(FileExistsError):
        save_key(path, Key.generate())
    assert load_key(path).public == first.public
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"abc", b"zz" * 32, b"\xff" * 40, b"00" * 31])
def test_a_damaged_key_is_refused(tmp_path, content):
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StateError, match="damaged"):
        load_key(path)


def test_a_missing_or_unwritable_key_is_one_line(tmp_path):
    with pytest.raises(StateError, match="cannot read"):
        load_key(tmp_path / "none.key")
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot make"):
        save_key(tmp_path / "file" / "node.key", Key.generate())

"""Archives: the same files give the same bytes, and what strangers packed is verified before anything is written."""

import hashlib
import io
import os
import shutil
from pathlib import Path

import pytest

from shoal.env_packages import archive
from shoal.env_packages.archive import Index, PackedFile, digest_of, header_of, index_folder, matches, pack, unpack
from shoal.errors import ConfigError, PeerError
from shoal.protocol.encoding import domain_hash, to_json

ABOUT = b'name = "ann/guess"\nversion = "0.1.0"\nlicence = "MIT"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "guess"
    (place / "data").mkdir(parents=True)
    (place / "environment.toml").write_bytes(ABOUT)
    (place / "environment.py").write_text("environment = None\n")
    (place / "data" / "words.txt").write_text("crane\n" * 3)
    return place


def packed(folder: Path) -> tuple[str, bytes]:
    into = io.BytesIO()
    return pack(folder, into).digest, into.getvalue()


def forged(files: dict[str, bytes] | list[tuple[str, bytes]], behind: bytes = b"") -> tuple[str, bytes]:
    """The archive of a stranger who keeps to the format, and its digest."""
    pairs = list(files.items() if isinstance(files, dict) else files)
    index = Index(tuple(PackedFile(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in pairs))
    return digest_of(index), header_of(index) + b"".join(data for _, data in pairs) + behind


def test_a_package_is_unpacked_as_it_was_packed(folder: Path, tmp_path: Path) -> None:
    digest, data = packed(folder)
    index = unpack(io.BytesIO(data), digest, tmp_path / "out")
    assert matches(tmp_path / "out", index) == ""
    assert index_folder(tmp_path / "out") == index and packed(tmp_path / "out") == (digest, data)


def test_two_machines_pack_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, other)
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
        os.chmod(path, 0o755)
    (other / ".git").mkdir()
    (other / ".git" / "HEAD").write_text("hidden files are left out")
    (other / "__pycache__").mkdir()
    (other / "__pycache__" / "environment.cpython-311.pyc").write_bytes(b"x")
    assert packed(other) == packed(folder)


def test_digests_of_packages_never_change() -> None:
    """Run files and logs name packages by it."""
    digest, _ = forged({"environment.toml": ABOUT})
    assert digest == "bd9af003de72d1577229cc91a083ca9ab9fc08c0bc2fdff359f8b7da39235957"


@pytest.mark.parametrize("make", [
    lambda folder: (folder / "link").symlink_to("/etc/passwd"),
    lambda folder: (folder / "folder").symlink_to(folder / "data"),
    lambda folder: os.mkfifo(folder / "pipe"),
], ids=["link", "link to a folder", "device"])  # fmt: skip
def test_links_and_devices_are_not_packed(folder: Path, make) -> None:
    make(folder)
    with pytest.raises(ConfigError, match="link or a device"):
        pack(folder, io.BytesIO())


@pytest.mark.parametrize("name", ["wörter.txt", "a b.txt", "x" * 201, "end."])
def test_names_that_other_disks_spell_differently_are_not_packed(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    with pytest.raises(ConfigError, match="cannot be packed: its path"):
        pack(folder, io.BytesIO())


@pytest.mark.parametrize("path", [
    "../escape", "/etc/cron.d/evil", "a/../../b", "./a", "a//b", "..", "a\\..\\b", "C:evil", ".bashrc", "a/.ssh/key",
    "a\0b", "a\nb", "new\u2044name", "\uff0e\uff0e/x", "\u202egnp.py", "caf\u00e9", "x" * 300, "/".join("a" * 20), "",
    "aux.", "__pycache__/environment.cpython-311.pyc", "words.pyc",
])  # fmt: skip
def test_a_path_that_could_lead_elsewhere_is_refused_before_anything_is_written(path: str, tmp_path: Path) -> None:
    digest, data = forged(sorted({"environment.toml": ABOUT, path: b"evil"}.items()))
    with pytest.raises(PeerError, match="refused: its path"):
        unpack(io.BytesIO(data), digest, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("paths", [["A.py", "a.py"], ["a", "a/b"], ["Data/x", "data/y"], ["A", "a/b"]])
def test_two_paths_that_a_disk_takes_for_one_are_refused(paths: list[str], tmp_path: Path) -> None:
    digest, data = forged(sorted((path, b"") for path in ["environment.toml", *paths]))
    with pytest.raises(PeerError, match="are one on some disks"):
        unpack(io.BytesIO(data), digest, tmp_path / "out")


@pytest.mark.parametrize("files", [
    [("environment.toml", ABOUT), ("environment.toml", b"other")],
    [("environment.toml", ABOUT), ("a", b"")],
    [("a", b"")],
], ids=["twice", "not sorted", "no description"])  # fmt: skip
def test_an_index_of_another_form_is_refused(files: list[tuple[str, bytes]], tmp_path: Path) -> None:
    digest, data = forged(files)
    with pytest.raises(PeerError, match=r"not sorted|no environment"):
        unpack(io.BytesIO(data), digest, tmp_path / "out")


def test_a_million_files_are_refused_by_the_size_of_the_index(tmp_path: Path) -> None:
    body = b'{"files":[' + b",".join(b'{"path":"f%d","size_bytes":0,"sha256":""}' % i for i in range(60_000)) + b"]}"
    data = archive.MAGIC + len(body).to_bytes(8, "big") + body
    with pytest.raises(PeerError, match="its index is larger"):
        unpack(io.BytesIO(data), domain_hash("package", body).hex(), tmp_path / "out")
    many = Index(tuple(PackedFile(f"f{i:05}", 0, "") for i in range(archive.MAX_FILES + 1)))
    with pytest.raises(PeerError, match="4097 files, limit 4096"):
        unpack(io.BytesIO(header_of(many)), digest_of(many), tmp_path / "out")


@pytest.mark.parametrize("sizes", [[archive.MAX_PACKAGE_BYTES, 1], [archive.MAX_PACKAGE_BYTES + 1, 0], [-1, 0]])
def test_a_package_beyond_the_limit_is_refused_before_it_is_read(sizes: list[int], tmp_path: Path) -> None:
    files = [{"path": path, "size_bytes": size, "sha256": ""} for path, size in zip("ab", sizes, strict=True)]
    body = to_json({"files": [*files, {"path": "environment.toml", "size_bytes": 0, "sha256": ""}]})
    data = archive.MAGIC + len(body).to_bytes(8, "big") + body
    with pytest.raises(PeerError, match=r"limit 4294967296|no valid index"):
        unpack(io.BytesIO(data), domain_hash("package", body).hex(), tmp_path / "out")


def test_any_changed_byte_is_noticed(folder: Path, tmp_path: Path) -> None:
    digest, data = packed(folder)
    for at in (0, 10, 20, 30, len(data) // 2, len(data) - 1):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(PeerError):
            unpack(io.BytesIO(changed), digest, tmp_path / f"out{at}")
    for at in (0, 12, 40, len(data) - 1):
        with pytest.raises(PeerError):
            unpack(io.BytesIO(data[:at]), digest, tmp_path / f"cut{at}")


def test_another_package_under_this_digest_is_refused_before_it_is_parsed(folder: Path, tmp_path: Path) -> None:
    digest, _ = packed(folder)
    _, other = forged({"environment.toml": ABOUT})
    with pytest.raises(PeerError, match="another digest"):
        unpack(io.BytesIO(other), digest, tmp_path / "out")


def test_a_file_with_other_bytes_and_bytes_behind_the_files_are_named(folder: Path, tmp_path: Path) -> None:
    digest, data = packed(folder)
    with pytest.raises(PeerError, match=r"file environment.toml of package .* another digest"):
        unpack(io.BytesIO(data[:-1] + b"#"), digest, tmp_path / "a")
    with pytest.raises(PeerError, match="bytes after its files"):
        unpack(io.BytesIO(data + b"PK\x03\x04"), digest, tmp_path / "b")


def test_an_index_with_another_encoding_is_refused(tmp_path: Path) -> None:
    """One package has one digest."""
    index = Index((PackedFile("environment.toml", len(ABOUT), hashlib.sha256(ABOUT).hexdigest()),))
    body = to_json(index).replace(b":", b": ")
    data = archive.MAGIC + len(body).to_bytes(8, "big") + body + ABOUT
    with pytest.raises(PeerError, match="another form"):
        unpack(io.BytesIO(data), domain_hash("package", body).hex(), tmp_path / "out")


def test_a_changed_added_or_linked_file_of_an_unpacked_folder_is_found(folder: Path, tmp_path: Path) -> None:
    digest, data = packed(folder)
    for number, (change, path) in enumerate({
        lambda out: (out / "environment.py").write_text("environment = True\n"): "environment.py",
        lambda out: (out / "sitecustomize.py").write_text(""): "sitecustomize.py",
        lambda out: (out / "data" / "words.txt").unlink(): "data/words.txt",
        lambda out: (out / ".hidden").symlink_to("/etc"): ".hidden",
    }.items()):  # fmt: skip
        out = tmp_path / f"out{number}"
        index = unpack(io.BytesIO(data), digest, out)
        change(out)
        assert matches(out, index) == path

"""The archive of a package: an index of its files, then their bytes. Packs a folder, and unpacks what strangers packed.

An archive is

    MAGIC, length of the index (8 bytes, big-endian), index (canonical JSON), the files' bytes in the order of the index

It is neither tar nor zip, so that links, devices, owners, times, modes, nested archives and sizes that only show while
unpacking do not exist in it; and so that the same files give the same bytes whatever library made them. The digest of a
package covers the index, and the index covers every file. Unpacking verifies both, and writes into a folder of its own.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec

from shoal.env_packages.package_reference import COMPILED, flaw_of_path
from shoal.errors import ConfigError, PeerError, cause_of
from shoal.protocol.encoding import WireError, domain_hash, from_json, to_json
from shoal.protocol.field_types import Message

MAGIC = b"shoal package 1\n"

ABOUT = "environment.toml"
"""The file that describes a package. Each package has it."""

MAX_FILES = 4096
"""Files of a package."""

MAX_PACKAGE_BYTES = 4 << 30
"""Bytes of all files of a package."""

MAX_INDEX_BYTES = 2 << 20
"""4,096 entries with the longest paths take 1.4 MB."""

_PART_BYTES = 1 << 20


class PackedFile(Message, frozen=True):
    """One file of a package."""

    path: str
    """From the package's folder, with slashes."""
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PACKAGE_BYTES)]
    sha256: str


class Index(Message, frozen=True):
    """All files of a package, sorted by path."""

    files: tuple[PackedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of the files together."""
        return sum(file.size_bytes for file in self.files)


class Packed(NamedTuple):
    """An archive that was written."""

    digest: str
    size_bytes: int
    """Of the whole archive."""
    files: Index


def digest_of(index: Index) -> str:
    """The digest of a package, hex. Equal digests mean equal paths and equal bytes."""
    return domain_hash("package", to_json(index)).hex()


def header_of(index: Index) -> bytes:
    """All of an archive that comes before the files."""
    body = to_json(index)
    return MAGIC + len(body).to_bytes(8, "big") + body


# --- packing ---


def index_folder(folder: Path) -> Index:
    """The files of a folder as a package holds them: all but hidden and compiled ones. Raises `ConfigError`."""
    files: list[PackedFile] = []
    for path, found in _walk(folder, ""):
        if len(files) == MAX_FILES:
            raise ConfigError(f"{folder} has more than {MAX_FILES} files, the limit for a package: put them into one")
        sha256, size = _hashed(found)
        files.append(PackedFile(path, size, sha256))
    index = Index(tuple(sorted(files, key=lambda file: file.path)))
    if flaw := flaw_of_index(index):
        raise ConfigError(f"{folder} cannot be packed: {flaw}")
    return index


def pack(folder: Path, into: BinaryIO) -> Packed:
    """Write a folder's archive. Raises `ConfigError` if the folder cannot be packed, or changes meanwhile."""
    index = index_folder(folder)
    header = header_of(index)
    into.write(header)
    for file in index.files:
        with (folder / file.path).open("rb") as source:
            if _copy(source, into, file.size_bytes) != file.sha256 or source.read(1):
                raise ConfigError(
                    f"{folder / file.path} changed while it was packed: pack again when nothing writes there"
                )
    return Packed(digest_of(index), len(header) + index.size_bytes, index)


def _walk(folder: Path, above: str) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {cause_of(error)}. Give the folder of a package") from None
    for entry in entries:
        path = above + entry.name
        if entry.name.startswith(".") or entry.name == "__pycache__" or entry.name.endswith(COMPILED):
            continue
        if flaw := flaw_of_path(path):
            raise ConfigError(f"{entry.path} cannot be packed: its path {flaw}. Rename it, or move it away")
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{path}/")
        elif entry.is_file(follow_symlinks=False):
            yield path, Path(entry.path)
        else:  # a link would mean another file on each machine
            raise ConfigError(f"{entry.path} cannot be packed: it is a link or a device. Put the file itself there")


def _hashed(path: Path) -> tuple[str, int]:
    hashed, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                hashed.update(part)
                size += len(part)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}. Make it readable, or move it away") from None
    return hashed.hexdigest(), size


def _copy(source: BinaryIO, into: BinaryIO, size: int) -> str:
    """Copy exactly `size` bytes and return their SHA-256; of fewer bytes if the source ends early."""
    hashed = hashlib.sha256()
    while size and (part := source.read(min(size, _PART_BYTES))):
        hashed.update(part)
        into.write(part)
        size -= len(part)
    return hashed.hexdigest()


# --- what is in an archive by a stranger ---


def flaw_of_index(index: Index) -> str:
    """Why no package has this index; empty if one may."""
    paths = [file.path for file in index.files]
    if len(paths) > MAX_FILES:
        return f"it has {len(paths)} files, limit {MAX_FILES}"
    if paths != sorted(set(paths)):
        return "its files are not sorted, or one is listed twice"
    if index.size_bytes > MAX_PACKAGE_BYTES:
        return f"its files have {index.size_bytes} bytes, limit {MAX_PACKAGE_BYTES}"
    for path in paths:
        if flaw := flaw_of_path(path):
            return f"its path {path[:200]!r} {flaw}"
    if clash := _clash(paths):
        return f"its paths {clash[0]} and {clash[1]} are one on some disks"
    return "" if ABOUT in paths else f"it has no {ABOUT}, which `shoal env init` writes"


def _clash(paths: list[str]) -> tuple[str, str] | None:
    """Two paths that a disk may take for one: they differ in case only, or one is a file and the other a folder."""
    spelled: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        prefixes = ["/".join(parts[:length]) + "/" for length in range(1, len(parts))]
        for prefix in (*prefixes, path):
            known = spelled.setdefault(prefix.rstrip("/").lower(), prefix)
            if known != prefix:  # guard: one-file-on-any-disk
                return known, prefix
    return None


def read_index(archive: BinaryIO, digest: str) -> Index:
    """The index of an archive, verified against the package's digest. Raises `PeerError`."""
    start = archive.read(len(MAGIC) + 8)
    length = int.from_bytes(start[len(MAGIC) :], "big")
    if not start.startswith(MAGIC) or len(start) < len(MAGIC) + 8 or length > MAX_INDEX_BYTES:
        raise PeerError(
            f"package {digest[:16]}… was not packed by shoal, or its index is larger than {MAX_INDEX_BYTES} bytes: use "
            "another registry"
        )
    body = archive.read(length)
    if domain_hash("package", body).hex() != digest:  # guard: digest-of-the-package
        raise PeerError(f"package {digest[:16]}… has another digest: it was changed. Use another registry")
    try:
        index = from_json(body, Index)
    except WireError as error:
        raise PeerError(
            f"package {digest[:16]}… has no valid index ({error}): ask its author to pack it again"
        ) from None
    flaw = flaw_of_index(index) or ("" if to_json(index) == body else "its index has another form than ours")
    if flaw:  # guard: index-is-checked
        raise PeerError(f"package {digest[:16]}… is refused: {flaw}. Ask its author to pack it again")
    return index


def unpack(archive: BinaryIO, digest: str, folder: Path) -> Index:
    """Unpack a verified archive into a folder that this makes. Raises `PeerError` if it is wrong, OSError if writing fails.

    After an error the folder holds a part of the files: delete it.
    """
    index = read_index(archive, digest)
    folder.mkdir()
    for file in index.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as into:
            sha256 = _copy(archive, into, file.size_bytes)
        if sha256 != file.sha256:  # guard: digest-of-each-file
            raise PeerError(f"file {file.path} of package {digest[:16]}… has another digest: it was changed. Use another "
                            "registry")  # fmt: skip
    if archive.read(1):  # guard: nothing-behind-the-files
        raise PeerError(f"package {digest[:16]}… has bytes after its files: it was changed. Use another registry")
    return index


def matches(folder: Path, index: Index) -> str:
    """The first path at which an unpacked folder differs from its index; empty if there is none."""
    found = dict(_everything(folder))
    wanted = {file.path: file for file in index.files}
    for path in sorted(found.keys() | wanted.keys()):
        if path not in found or path not in wanted:
            return path
        mode = found[path].lstat()
        if not stat.S_ISREG(mode.st_mode) or mode.st_size != wanted[path].size_bytes:
            return path
        if _hashed(found[path])[0] != wanted[path].sha256:
            return path
    return ""


def _everything(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each file, link and device in a folder, hidden ones too."""
    for above, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(above) / name).is_symlink()]
        for name in (*files, *links):
            place = Path(above) / name
            yield place.relative_to(folder).as_posix(), place

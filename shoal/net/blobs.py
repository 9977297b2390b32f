"""Bulk data stored under its hash: submissions and chunks.

Called by the coordinator and by weight caches. One file ab/abcdef… holds each blob. File names come from checked
hashes, never from a peer's path. Data is verified when it is read. Data damaged on disk is refused; the next put
repairs it.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import DISK_FULL, NothingYet, StateError, cause_of
from shoal.folder import name_file, sync_folder
from shoal.net.file_answer import FileAnswer
from shoal.protocol import wire
from shoal.protocol.wire import is_digest


def path_of(folder: Path, digest: str) -> Path:
    """The path of a blob in a folder of blobs. Raises `NothingYet` if `digest` is not a hash."""
    if not is_digest(digest):
        raise NothingYet(f"{digest[:80]!r} is not the SHA-256 of a blob: write 64 lower-case hex digits")
    return folder / digest[:2] / digest


def serve_blob(folder: Path, digest: str, *, public: bool = True) -> FileAnswer:
    """A blob of a folder that perhaps another process fills, as an HTTP answer. Raises `NothingYet`."""
    try:
        return FileAnswer(path_of(folder, digest), digest, public=public)
    except FileNotFoundError:
        raise NothingYet(f"there is no blob {digest[:16]}…: it was never stored, or has expired") from None


class FolderBlobs:
    """Bytes stored under their SHA-256 in a folder. One process writes; any process may read.

    Calls block: from async code, use `asyncio.to_thread` for large blobs.
    """

    def __init__(self, folder: Path) -> None:
        """Open or make the folder, and delete files that a crash left incomplete."""
        self.folder = folder
        self._unfinished = folder / "unfinished"
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from None
        for leftover in self._unfinished.iterdir():
            leftover.unlink()
        self.stored_bytes = sum(path.stat().st_size for path in self.paths())
        self.coming_bytes = 0
        """Those of unfinished uploads."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk: stored, or of unfinished uploads."""
        return self.stored_bytes + self.coming_bytes

    def put(self, data: bytes, digest: str = "") -> str:
        """Store bytes and return their hash. They are durable on return. Raises `StateError` if storing fails.

        They are written to another file, synced and then renamed, so a named file is always whole. `digest` is their
        hash, if the caller has just verified it.
        """
        digest = digest or wire.digest(data)
        path = self.path_of(digest)
        if path.exists() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return digest
        with self.upload() as upload:
            upload.write(data)
            upload.keep(digest)
        return digest

    def adopt(self, file: Path, digest: str, size: int) -> None:
        """Take over a durable file of this disk, whose hash and size the caller has just verified. Raises `StateError`."""
        path = self.path_of(digest)
        known_bytes = path.stat().st_size if path.exists() else 0
        try:
            if not path.parent.exists():
                path.parent.mkdir()
                sync_folder(self.folder)
            os.replace(file, path)
            sync_folder(path.parent)
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self.stored_bytes += size - known_bytes

    def upload(self) -> "Upload":
        """Start to receive bytes whose hash is not verified yet. Use as `with blobs.upload() as upload`."""
        return Upload(self)

    def get(self, digest: str) -> bytes:
        """The bytes, verified. Raises `NothingYet` if they are missing, `StateError` if they are damaged."""
        try:
            data = self.path_of(digest).read_bytes()
        except FileNotFoundError:
            raise NothingYet(f"there is no blob {digest[:16]}…: it was never stored, or has expired") from None
        except OSError as error:
            raise StateError(f"cannot read blob {digest[:16]}… in {self.folder}: {cause_of(error)}") from None
        if wire.digest(data) != digest:
            raise StateError(
                f"blob {digest[:16]}… in {self.folder} is damaged: check the disk, then send the blob again to repair it"
            )
        return data

    def has(self, digest: str) -> bool:
        """Whether the hash has a file."""
        return self.path_of(digest).exists()

    def delete(self, digest: str) -> None:
        """Delete the file, if there is one."""
        path = self.path_of(digest)
        if path.exists():
            self.stored_bytes -= path.stat().st_size
            path.unlink()

    def serve(self, digest: str, *, public: bool = True) -> FileAnswer:
        """The blob as an HTTP answer from the file; only a public one may be cached on the way. Raises `NothingYet`."""
        return serve_blob(self.folder, digest, public=public)

    def path_of(self, digest: str) -> Path:
        """The path at which a blob is or would be stored. Raises `NothingYet` if `digest` is not a hash."""
        return path_of(self.folder, digest)

    def paths(self) -> Iterator[Path]:
        """The files of all blobs; their names are the hashes."""
        return (path for path in self.folder.glob("[0-9a-f][0-9a-f]/*") if is_digest(path.name))


class Upload:
    """Bytes on their way into a folder of blobs: written to disk in parts, then named by their verified hash."""

    def __init__(self, blobs: FolderBlobs) -> None:
        """Like every other method, raises `StateError` if the disk cannot take the bytes."""
        self.size = 0
        """Bytes written so far."""
        self._kept = False
        self._blobs = blobs
        self._aside = blobs.folder / "unfinished" / secrets.token_hex(8)
        try:
            self._file = self._aside.open("xb")
        except OSError as error:
            raise _cannot_write(blobs.folder, error) from None

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # closing flushes the buffer, whose bytes were never promised to be kept
            self._file.close()
        self._aside.unlink(missing_ok=True)
        self._blobs.coming_bytes -= 0 if self._kept else self.size

    def write(self, part: bytes) -> None:
        """Add bytes."""
        try:
            self._file.write(part)
        except OSError as error:
            raise _cannot_write(self._blobs.folder, error) from None
        self.size += len(part)
        self._blobs.coming_bytes += len(part)

    def read(self) -> bytes:
        """All bytes written so far."""
        try:
            self._file.flush()
            return self._aside.read_bytes()
        except OSError as error:
            raise _cannot_write(self._blobs.folder, error) from None

    def keep(self, digest: str) -> None:
        """Store the bytes under their verified hash. They are durable on return."""
        path = self._blobs.path_of(digest)
        known_bytes = path.stat().st_size if path.exists() else 0
        try:
            if not path.parent.exists():
                path.parent.mkdir()
                sync_folder(
                    self._blobs.folder
                )  # the first blob in a folder is not durable before the folder's own name
            name_file(self._file, self._aside, path)
        except OSError as error:
            raise _cannot_write(self._blobs.folder, error) from None
        self._kept = True
        self._blobs.coming_bytes -= self.size
        self._blobs.stored_bytes += self.size - known_bytes


def _cannot_write(folder: Path, error: OSError) -> StateError:
    full = error.errno in DISK_FULL
    remedy = "Free some space there or lower storage.quota_mb by --set; nothing" if full else "Nothing"
    return StateError(f"cannot store blobs in {folder}: {cause_of(error)}. {remedy} that was answered is lost")

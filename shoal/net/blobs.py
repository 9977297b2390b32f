"""Blobs: files named by their SHA-256, their store, and their download by ranges."""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from shoal.errors import DISK_FULL, NothingYet, StateError, cause_of
from shoal.net import server
from shoal.net.server import Gate
from shoal.protocol import encoding
from shoal.protocol.encoding import is_digest
from shoal.run_folder import name_file, sync_folder

# --- A file as an answer, for clients that may be many and slow ---
#
# A file's name is its hash, so its bytes never change and any cache may keep them.


FIRST_PART_BYTES = 64 << 10
"""An answer begins with a part of this size. Each further part is twice as large: a slow client holds little memory, and a
fast one costs few reads, each of which goes through another thread."""

MOST_PART_BYTES = 1 << 20

ANSWERS_BYTES = 16 << 20
"""All answers that are open together have parts of about so many bytes, or of FIRST_PART_BYTES each if that is more."""

FOREVER = "public, max-age=31536000, immutable"

PRIVATE = "private, no-store"

_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})", re.ASCII)


class _OpenAnswers:
    count = 0

    @classmethod
    @contextlib.contextmanager
    def one(cls) -> Iterator[None]:
        cls.count += 1
        try:
            yield
        finally:
            cls.count -= 1

    @classmethod
    def largest_part(cls) -> int:
        return min(MOST_PART_BYTES, max(FIRST_PART_BYTES, ANSWERS_BYTES // max(1, cls.count)))


class _OpenFile:
    """An open file. It is closed even if its answer is never sent."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self.close()


class FileAnswer(Response):
    """Some bytes of a file, whole or by Range. The client verifies them.

    The file is open from the beginning, so the answer ends well if the file is renamed or deleted meanwhile. Several ranges
    in one request get the whole file, as HTTP allows.
    """

    def __init__(self, path: Path, name: str, *, offset: int = 0, size: int | None = None, public: bool = True) -> None:
        """The `size` bytes from `offset` on, or the rest of the file. `name` is their hash. Raises OSError."""
        self._path, self._offset, self._file = path, offset, _OpenFile(path)
        rest = os.fstat(self._file.number).st_size - offset
        self._size = rest if size is None else size
        self.status_code, self.background = 200, None
        self._etag = f'"{name}"'
        headers = {"etag": self._etag, "cache-control": FOREVER if public else PRIVATE, "accept-ranges": "bytes"}
        self.media_type = "application/octet-stream"
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a GET or a HEAD."""
        try:
            await self._answer(scope, send)
        finally:
            self._file.close()

    async def _answer(self, scope: Scope, send: Send) -> None:
        asked = Headers(scope=scope)
        if names(asked.get("if-none-match", ""), self._etag):
            await self._start(send, 304, {})
            await send({"type": "http.response.body", "body": b""})
            return
        start, end = 0, self._size
        if asked.get("if-range", self._etag) == self._etag and (found := _RANGE.fullmatch(asked.get("range", ""))):
            start, end = _span(found[1], found[2], self._size)
        if start >= end and self._size:
            await self._start(send, 416, {"content-range": f"bytes */{self._size}", "content-length": "0"})
            await send({"type": "http.response.body", "body": b""})
            return
        partial = (start, end) != (0, self._size)
        ranged = {"content-range": f"bytes {start}-{end - 1}/{self._size}"} if partial else {}
        await self._start(send, 206 if partial else 200, {"content-length": str(end - start), **ranged})
        if scope["method"] == "HEAD" or start == end:
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._send(send, self._offset + start, end - start)

    async def _start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": [*self.raw_headers, *raw]})

    async def _send(self, send: Send, at: int, left: int) -> None:
        """The last part is marked as such: the next request may come as soon as the client has it."""
        size = FIRST_PART_BYTES
        with _OpenAnswers.one():
            while left:
                size = min(size, _OpenAnswers.largest_part(), left)
                part = await asyncio.to_thread(os.pread, self._file.number, size, at)  # guard: opened-once
                if len(part) != size:
                    raise OSError(f"{self._path} is shorter than it was")  # the connection closes
                at, left, size = at + size, left - size, 2 * size
                await send({"type": "http.response.body", "body": part, "more_body": left > 0})


def _span(first: str, last: str, size: int) -> tuple[int, int]:
    """The bytes that a Range names, from and before; empty if it names none."""
    if not first:
        return (max(0, size - int(last)), size) if last else (0, size)
    end = min(int(last) + 1, size) if last else size
    return (int(first), end) if int(first) < end else (size, size)


def names(condition: str, etag: str) -> bool:
    """Whether the header `if-none-match` of a request names this tag: the client has these bytes."""
    return condition.strip() == "*" or any(each.strip().removeprefix("W/") == etag for each in condition.split(","))


# --- Bulk data stored under its hash ---
#
# One file ab/abcdef… holds each blob. File names come from checked hashes, never from a peer's path. Data is verified
# when it is read. Data damaged on disk is refused; the next put repairs it.


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
        digest = digest or encoding.digest(data)
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
        if encoding.digest(data) != digest:
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


# --- A folder of public blobs over HTTP ---
#
# It asks nobody who may read: all that is in the folder is public. An ordinary web server can serve the same folder in
# its place.


def blob_app(
    folder: Path,
    clock: Callable[[], float],
    *,
    gate: Gate | None = None,
    serve: Callable[[str], Response] | None = None,
    more: Sequence[BaseRoute] = (),
    **options: Any,
) -> Starlette:
    """An application that serves a folder's blobs. `gate` limits the rate of each address. `serve` makes the answer for a
    hash, if not simply from the folder; `more` are further routes; `options` are Starlette's."""
    gate = gate or Gate(clock)

    async def get_blob(request: Request) -> Response:
        await gate.anyone(request)
        name = request.path_params["hash"]
        return serve(name) if serve else serve_blob(folder, name)

    async def get_health(request: Request) -> Response:
        await gate.anyone(request)
        return PlainTextResponse("ok\n")

    return server.application([Route("/v1/blobs/{hash}", get_blob), Route("/healthz", get_health), *more], **options)

"""A file as an answer, for clients that may be many and slow: ranges, conditional requests, little memory.

Called by everything that serves blobs. A file's name is its hash, so its bytes never change and any cache may keep them.
It knows no hash and no right to read.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
    """How many answers of this process are open."""

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

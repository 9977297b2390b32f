"""A new file that is written straight to the disk, past the system's cache, where the disk allows that.

Called by `checkpoint`: a state is written after every step and read after a crash only. In the cache it would take time
and memory, and push out what is used. Nothing here makes a file durable.

The system takes straight writes of whole blocks only, from memory and at places that are multiples of a block. So bytes
are collected in a buffer of its own. The end of the file, and all that follows a write which stops within a page, goes
through the cache; so does all of it on file systems that know no straight writes, and on macOS.
"""

import errno
import fcntl
import mmap
import os
import zlib
from pathlib import Path
from types import TracebackType

_BUFFER_BYTES = 1 << 20

_STRAIGHT = getattr(os, "O_DIRECT", 0)


class StraightFile:
    """Use as `with StraightFile(path) as file`. Raises OSError; what was written is then left for the caller to delete."""

    def __init__(self, path: Path) -> None:
        """Raises FileExistsError if there is such a file."""
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        """Shared memory, which begins at a page. Private memory could be copied by a fork while the disk reads it."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._filled = 0
        self._is_straight = False
        self._go_straight(True)
        self.crc32 = 0
        """Of all bytes, once the file is closed."""

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        left = memoryview(data).cast("B")
        while left:
            part = left[: _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled, left = self._filled + len(part), left[len(part) :]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        filled, done = memoryview(self._buffer)[: self._filled], 0
        self.crc32 = zlib.crc32(filled, self.crc32)
        while done < len(filled):
            if done % mmap.PAGESIZE or len(filled) % mmap.PAGESIZE:  # after a short write, or at the end
                self._go_straight(False)
            try:
                done += os.write(self._file, filled[done:])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_straight:
                    raise
                self._go_straight(False)  # the disk's blocks are larger than a page
        self._filled = 0

    def _go_straight(self, wanted: bool) -> None:
        """Write straight from now on, if the file system can, or through the cache."""
        if not _STRAIGHT or wanted == self._is_straight:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _STRAIGHT if wanted else flags & ~_STRAIGHT)
            self._is_straight = wanted
        except OSError:
            if not wanted:
                raise

    def __enter__(self) -> "StraightFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            os.close(self._file)

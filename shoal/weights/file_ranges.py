"""Bytes of a file on this machine that are to be in another file, too.

A chunk that is a whole file of the trainer's is not copied, but gets a second name: nobody writes to the file again.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_COPY_BYTES = 256 << 10


class Span(NamedTuple):
    """Some bytes of a file."""

    path: Path
    start: int
    size: int


def copy_span(span: Span, target: Path) -> None:
    """Make a new file of these bytes; if they are a whole file of the same disk, another name of that. Raises OSError."""
    if span.start == 0 and span.size == span.path.stat().st_size:
        try:
            os.link(span.path, target)
            return
        except FileExistsError:
            raise
        except OSError:
            pass  # it is on another disk, or the disk knows no second names
    with target.open("xb", buffering=0) as file:
        append_span(span, file.fileno())


def append_span(span: Span, target: int) -> None:
    """Write the bytes of a span to an open file, at its position. Raises OSError, also if the source is too short."""
    for data in read_span(span):
        while data:
            data = data[os.write(target, data) :]


def read_span(span: Span) -> Iterator[memoryview]:
    """The bytes of a span, in parts that are valid until the next is read. Raises OSError if the source is too short."""
    buffer, left = memoryview(bytearray(min(span.size, _COPY_BYTES))), span.size
    with span.path.open("rb", buffering=0) as file:
        file.seek(span.start)
        while left:
            read = file.readinto(buffer[:left])
            if not read:
                raise OSError(f"{span.path} is shorter than {span.start + span.size} bytes")
            left -= read
            yield buffer[:read]

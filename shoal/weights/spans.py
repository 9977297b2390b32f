"""Bytes of a file on this machine that are to be in another file, too.

Called by `publish`, `pieces` and `stock`. A chunk of the trainer's that is a whole file gets a second name, and is not
copied: it is never written to.
"""

import os
from pathlib import Path
from typing import NamedTuple

_COPY_BYTES = 1 << 20


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
            pass  # another disk, or one that knows one name only
    with target.open("xb", buffering=0) as file:
        append_span(span, file.fileno())


def append_span(span: Span, target: int) -> None:
    """Write the bytes of a span to an open file, where it stands. Raises OSError, also if the source is too short."""
    at, end = span.start, span.start + span.size
    with span.path.open("rb", buffering=0) as file:
        while at < end:
            data = memoryview(os.pread(file.fileno(), min(end - at, _COPY_BYTES), at))
            if not data:
                raise OSError(f"{span.path} is shorter than {end} bytes")
            at += len(data)
            while data:
                data = data[os.write(target, data) :]

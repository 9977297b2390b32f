"""A machine that has run out of something, for tests of the error messages."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open no further file or connection, for real: its limit is lowered, and all below it is used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.open(os.devnull, os.O_RDONLY)
    used = [highest]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in used:
            os.close(descriptor)


@contextlib.contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """No file can grow beyond `max_bytes`, for real: libraries in C see it too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

"""Keys that a person presses while a picture is shown, read without waiting for Enter.

Where standard input is no terminal, no key comes. It knows no key's meaning.
"""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

MOST_KEYS = 64
"""Bytes read at once: what is pasted by mistake is not a thousand commands."""


class Keyboard:
    """The keys of a terminal."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_there(self) -> bool:
        """Whether a key can come."""
        return self._descriptor is not None

    def pressed(self, wait_s: float = 0.0) -> str:
        """The keys since the last call, after waiting at most so long for the first; "" without any."""
        if self._descriptor is None or not select.select([self._descriptor], [], [], wait_s)[0]:
            return ""
        try:
            keys = os.read(self._descriptor, MOST_KEYS)
        except OSError:
            keys = b""
        if not keys:  # the terminal is gone: it would be ready at once for ever
            self._descriptor = None
        return keys.decode(errors="replace")


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """The terminal's keys, one by one and not echoed; the terminal is afterwards as before. Ctrl-C stays a signal."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        yield Keyboard(None)
        return
    if os.tcgetpgrp(descriptor) != os.getpgrp():  # started in the background: touching the terminal would stop us
        yield Keyboard(None)
        return
    try:
        tty.setcbreak(descriptor)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

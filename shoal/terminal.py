"""What strangers, hosts and policies wrote, as it may stand on a terminal: nothing in it can steer one.

Called wherever such text is printed or logged. Escapes are JSON's, so a line of the log stays the same JSON.
"""

import json
import logging


def printable(text: str, keep: str = "") -> str:
    """Text with everything escaped that does not print: controls, U+0080 to U+009F, marks that turn the direction."""
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)  # guard: escaped


def _escaped(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def say(text: str) -> None:
    """Print lines of which parts came from elsewhere."""
    print(printable(text, keep="\n"))


class PrintableFormatter(logging.Formatter):
    """A role's log: most of it is ours, but names and reasons are not."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")  # guard: printable-logs

"""Make text by strangers, hosts and policies safe to print: nothing in it can control the terminal.

Called wherever such text is printed or logged. Escapes are those of JSON, so a line of the log stays the same JSON.
"""

import copy
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

MAX_LINE_CHARS = 2000
"""Of a line of a role's log; a traceback after it is whole."""

MOST_MARKS = 2
"""Combining marks after one letter: as many as words of living languages need."""

_QUOTES = re.compile('["`\u00ab\u00bb\u2018-\u201f\u2039\u203a\u300c-\u300f\uff02\uff07]')

_SELECTORS = frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
"""Variation selectors: terminals disagree on how wide they make a character."""


def printable(text: str, keep: str = "") -> str:
    """Escape everything that does not print: controls, U+0080 to U+009F, marks that change the text direction."""
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)  # guard: escaped


def docs_page(path: str) -> str:
    """How a message names a page of the docs, such as docs/tutorial.md: a file only where it is one, in a checkout."""
    return (
        path if Path(path).is_file() else f"the page {path.removeprefix('docs/').removesuffix('.md')} of shoal's docs"
    )


def brief(text: str, most: int = 60) -> str:
    """A stranger's text for a cell of a table: printable, in one line of at most `most` characters.

    Of marks that are drawn over the letter before them, at most `MOST_MARKS` in a row are kept: a hundred of them would
    reach into the lines above. The rest, and what chooses between pictures of one letter, is left out.
    """
    cut, marks = list[str](), 0
    for c in unicodedata.normalize("NFC", text[: 4 * most]):
        marks = marks + 1 if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me") else 0
        if marks <= MOST_MARKS and c not in _SELECTORS:  # guard: marks-in-a-row
            cut.append(c)
    shown = printable("".join(cut))
    return shown if len(shown) <= most and len(text) <= 4 * most else shown[: most - 1] + "…"


def quote(text: str) -> str:
    """A stranger's text in quotes that it cannot end, so that it does not read as the program's own, or as a command."""
    return f'"{_QUOTES.sub(chr(39), printable(text))}"'  # guard: said-is-no-command


def _escaped(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def say(text: str, to: TextIO | None = None) -> None:
    """Print lines that contain text from elsewhere, to standard output if not elsewhere."""
    to, shown = to or sys.stdout, printable(text, keep="\n")
    print(wrapped(shown, shutil.get_terminal_size().columns) if to.isatty() else shown, file=to)


def wrapped(text: str, columns: int) -> str:
    """Text whose lines are broken at spaces where a terminal would break them within words. A command in backticks, or in
    a line of its own that begins with four spaces, stays whole: it is there to be copied."""
    rows = list[str]()
    for line in text.split("\n"):
        if _columns(line) <= columns or line.startswith("    "):
            rows.append(line)
            continue
        indent, row = " " * len(_MARGIN.match(line)[0]), ""  # type: ignore[index]
        for word in _WORDS.findall(line):
            if row.strip() and _columns(row + word) > columns:
                rows.append(row)
                row = indent + word.lstrip()
            else:
                row += word
        rows.append(row)
    return "\n".join(rows)


_WORDS, _MARGIN = re.compile(r"\s*(?:`[^`]*`|\S)+"), re.compile(r"[\s|]*")


def _columns(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def command(*words: str) -> str:
    """A command of ours to paste: it begins with `shoal` if that is on PATH, else as this process was called."""
    return " ".join([_program(), shlex.join(words)])


def as_called(text: str, run: Path | None = None) -> str:
    """Text of ours with its commands in backticks as `command` gives them. With `run`, a run's folder takes the place of
    RUN and RUN_DIR, and is added where only the action of `shoal admin` is named."""

    def typed(found: re.Match[str]) -> str:
        rest = found[1]
        if run is not None:
            folder = shlex.quote(str(run)).replace("\\", "\\\\")
            rest = re.sub(r"\bRUN(_DIR)?\b", folder, rest)
            rest = re.sub(r"^(admin [a-z-]+)$", rf"\1 {folder}", rest)
        return f"`{_program()} {rest}`"

    return re.sub(r"`shoal ([a-z][^`\n]*)`", typed, text)


def _program() -> str:
    called = Path(sys.argv[0])
    if shutil.which("shoal"):
        return "shoal"
    if called.name == "shoal":
        return _short(called)
    if called.parent.name == "shoal" and called.name == "__main__.py":
        return f"{_short(Path(sys.executable))} -m shoal"
    return "shoal"


def _short(program: Path) -> str:
    """A path as a shell takes it from here: absolute, or relative where that is shorter."""
    whole = os.path.abspath(program)
    near = os.path.relpath(whole)
    near = near if os.sep in near else os.path.join(os.curdir, near)
    return shlex.quote(min(whole, near, key=len))


class PrintableFormatter(logging.Formatter):
    """Formats a role's log. Most of the text is ours, but names and reasons come from others, who could fill a disk."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = copy.copy(record)
        named.name = _who(record.name)
        return super().formatMessage(named)[:MAX_LINE_CHARS]  # guard: short-log-lines

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")  # guard: printable-logs


class JsonFormatter(logging.Formatter):
    """Formats a role's log as one JSON object a line, in ASCII: time, level, role, who speaks, the message, and its fields.

    Fields come from our own format strings and their arguments, so what a stranger wrote cannot add one.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "from": _who(record.name),
            "message": record.getMessage()[:MAX_LINE_CHARS],
            "fields": {name: _plain(value) for name, value in _fields(record)},
        }
        if record.exc_info or record.exc_text:
            line["traceback"] = record.exc_text or self.formatException(record.exc_info)  # type: ignore[arg-type]
        return json.dumps(line, allow_nan=False)


_CONVERSION = re.compile(r"%%|(?:(?P<name>\w+)=['\"]?)?%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """Names and arguments of what a format string writes as `name=%d`."""
    names = [found["name"] for found in _CONVERSION.finditer(str(record.msg)) if found[0] != "%%"]
    if isinstance(record.args, tuple) and len(names) == len(record.args):
        yield from ((name, value) for name, value in zip(names, record.args, strict=True) if name)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | None) else str(value)[:MAX_LINE_CHARS]


def _who(logger: str) -> str:
    """Who speaks, for a reader who does not know our files: of shoal.weights.fetch.chunks, weights."""
    package, *inside = logger.split(".")
    if package != "shoal" or not inside:
        return logger
    return inside[-1] if inside[0] == "roles" and len(inside) > 1 else inside[0]

"""Values of strangers as SQLite and its full text take them.

Pure.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = (1 << 63) - 1
"""SQLite has no larger integers; a log of strangers may."""

MAX_SEARCHED_CHARS = 50_000
"""Characters of a text that a search covers."""


def plain(value: Any) -> Any:
    """A value that SQLite stores: no number out of its range, and no lone surrogate."""
    if isinstance(value, int):
        return int(value) if abs(value) <= LARGEST else math.copysign(LARGEST, value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value


def fit_for_search(text: str) -> str:
    """A text as full text stores it: without NUL, where SQLite would end, and not longer than is useful."""
    return str(plain(text[:MAX_SEARCHED_CHARS].replace("\0", " ")))


def values_of(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a line by name; those of a table within it by NAME/KEY."""
    for name, value in line.items():
        for inner, part in value.items() if isinstance(value, dict) else [("", value)]:
            yield f"{name}/{inner}" if inner else name, part


def numbers_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Like `values_of`, but only numbers."""
    for name, value in values_of(line):
        if isinstance(value, int | float):
            yield name, float(value)


def query_of(typed: str, *marks: str) -> str:
    """What a person typed as a query of full text: all of the words, in rows with all of these marks, such as a run's.

    A word that ends with * is a beginning. Nothing else that was typed is an operator.
    """
    words = [word for word in fit_for_search(typed).split() if word.strip("*")][:MOST_WORDS]
    asked = [f'"{word.rstrip("*").replace(chr(34), chr(34) * 2)}"' + "*" * word.endswith("*") for word in words]
    return " AND ".join([*(f"run : {mark}" for mark in marks), *(f"text : {word}" for word in asked)])


MOST_WORDS = 20
"""Of a search."""

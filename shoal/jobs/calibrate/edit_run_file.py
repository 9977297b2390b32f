"""Writes measured values into a run file, and changes no other line or comment.

It finds tables and keys by name, and does not know what they mean or how they were measured.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ConfigError
from shoal.protocol.messages import Bounds

Tables = dict[str, dict[str, float]]
"""Values by the name of their table as in a run file, such as `verify.bounds."float32/float32"`."""


def tables_of(bounds: dict[str, Bounds], activation_error: float | None) -> Tables:
    """The tables for these bounds (by "SAMPLED/RECOMPUTED") and, if the run asks for proofs, for their error."""
    found: Tables = {} if activation_error is None else {"verify": {"activation_error": activation_error}}
    return found | {f'verify.bounds."{pair}"': msgspec.to_builtins(of_pair) for pair, of_pair in bounds.items()}


def text_of(name: str, values: dict[str, float]) -> str:
    """A table as TOML."""
    return "\n".join((f"[{name}]", *(f"{key} = {value!r}" for key, value in values.items())))


def with_values(run_file: Path, found: Tables) -> str:
    """The run file's text with these values.

    Raises `ConfigError` if the file writes these tables in a form that this code cannot edit, such as inline tables.
    """
    text = run_file.read_text()
    for name, values in found.items():
        text = _with_table(text, name, values)
    try:
        holds = all(_at(tomllib.loads(text), name).items() >= values.items() for name, values in found.items())
    except (tomllib.TOMLDecodeError, KeyError):
        holds = False
    if not holds:
        raise ConfigError(
            f"cannot edit the form in which {run_file} writes [verify]: put the tables above into it by hand"
        )
    return text


def _with_table(text: str, name: str, values: dict[str, float]) -> str:
    """The text with one table's values replaced, line by line; or with the table added at the end."""
    head = re.search(rf"^\[{re.escape(name)}\][^\n]*\n?", text, re.MULTILINE)
    if head is None:
        return f"{text.rstrip()}\n\n{text_of(name, values)}\n"
    following = re.search(r"^\[", text[head.end() :], re.MULTILINE)
    end = head.end() + following.start() if following else len(text)
    inside = text[head.end() : end]
    for key, value in values.items():
        inside, hits = re.subn(rf"^(\s*{key}\s*=\s*)[^\s#]+", rf"\g<1>{value!r}", inside, flags=re.MULTILINE)
        inside = inside if hits else f"{key} = {value!r}\n{inside}"
    return text[: head.end()] + inside + text[end:]


def _at(table: dict[str, Any], name: str) -> dict[str, Any]:
    """The table of that name. Raises `KeyError`."""
    for part in name.split("."):
        table = table[part.strip('"')]
    return table

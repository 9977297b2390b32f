"""Values inside a tool call, read strictly: JSON, and the notations of Gemma and LFM.

The policy may write anything. Our limits on nesting and digits are below those of Python, which differ between machines and
call depths. Every fault is a `MalformedArguments`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_DEPTH = 32
"""Limit on the nesting of lists and objects."""

MAX_DIGITS = 64
"""Limit on the digits of a whole number."""

MAX_NAME = 256
"""Limit on the characters in the name of a tool or an argument."""

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string. One that is not closed matches, too, so that a long turn is read once and not once for each quote."""
_SINGLE = re.compile(r"((?:[^'\\]|\\.)*+)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_NUMBER = re.compile(r"-?\d{1,64}(?:\.\d{1,64})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_NAME = re.compile(r"[\w.\-]{1,256}", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class MalformedArguments(Exception):
    """A text that the notation does not allow. The message says why, in a few words."""


def read_json(text: str) -> Any:
    """One JSON value. Raises `MalformedArguments`."""
    depth = deepest = 0
    for character in _QUOTED.sub("", text):
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:  # guard: calls-are-shallow
        raise MalformedArguments(f"nested deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_constant)
    except ValueError:
        raise MalformedArguments("no JSON") from None  # Python's own words differ between its versions


def read_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises `MalformedArguments`."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise MalformedArguments(f"arguments are {type(value).__name__}, not an object")
    return value


def tagged(text: str, opening: str, middle: str, closing: str) -> dict[str, str]:
    """Keys and values between three marks, such as <parameter=, > and </parameter>. Pairs that are not closed are left
    out."""
    told = {}
    for piece in text.split(opening)[1:]:
        key, _, rest = piece.partition(middle)
        value, closed, _ = rest.partition(closing)
        if closed and 0 < len(key) <= MAX_NAME:
            told[key] = value
    return told


def typed(name: str, texts: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments written as plain text, read as the types in the tool's schema; text if it gives none."""
    properties: Any = {}
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
    return {key: _typed(text, properties.get(key, {})) for key, text in texts.items()}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type", "string") == "string":
        return text
    try:
        return _WORDS[text] if text in _WORDS else read_json(text)
    except MalformedArguments:
        return text


class ArgumentReader:
    """Reads `key=value` or `key:value` lists with quoted texts, from left to right."""

    def __init__(self, text: str, sign: str, quote: str) -> None:
        """`sign` separates key and value. `quote` delimits texts. If it is `'`, texts have escapes, and JSON strings are
        read, too."""
        self.text, self.sign, self.quote, self.at = text, sign, quote, 0

    def take(self, mark: str) -> bool:
        """Skip spaces, and then a mark if it is next."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise MalformedArguments(f"{mark} is missing at {self.at}")

    def name(self) -> str:
        self.take("")
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise MalformedArguments(f"a name is missing at {self.at}")
        self.at = found.end()
        return found[0]

    def pairs(self, end: str, depth: int = 0) -> dict[str, Any]:
        """Keys and values up to `end`."""
        told: dict[str, Any] = {}
        while not self.take(end):
            if told:
                self.need(",")
            text = self._text()
            key = self.name() if text is None else text
            self.need(":" if depth else self.sign)
            told[key] = self.value(depth)
        return told

    def value(self, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedArguments(f"nested deeper than {MAX_DEPTH} levels")
        text = self._text()
        if text is not None:
            return text
        if self.take("{"):
            return self.pairs("}", depth + 1)
        if self.take("["):
            return self._list(lambda: self.value(depth + 1))
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            return read_json(number[0])
        word = self.name()
        if word not in _WORDS:
            raise MalformedArguments(f"{word[:40]} is no value")
        return _WORDS[word]

    def _list(self, item: Callable[[], Any]) -> list[Any]:
        told: list[Any] = []
        while not self.take("]"):
            if told:
                self.need(",")
            told.append(item())
        return told

    def _text(self) -> str | None:
        """A quoted text; None if there is none here."""
        if self.quote == "'":
            self.take("")
            found = _QUOTED.match(self.text, self.at)
            if found is not None:
                self.at = found.end()
                return str(read_json(found[0]))
        if not self.take(self.quote):
            return None
        if self.quote == "'":
            found = _SINGLE.match(self.text, self.at)
            if found is None:
                raise MalformedArguments("a text is not closed")
            self.at = found.end()
            return _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), found[1])
        end = self.text.find(self.quote, self.at)
        if end < 0:
            raise MalformedArguments("a text is not closed")
        text, self.at = self.text[self.at : end], end + len(self.quote)
        return text


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:  # guard: calls-have-short-numbers
        raise MalformedArguments(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


def _fraction(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise MalformedArguments("a number is too large")
    return value


def _constant(text: str) -> Any:
    raise MalformedArguments(f"{text} is no JSON")

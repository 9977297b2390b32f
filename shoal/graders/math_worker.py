"""A program that says whether two mathematical expressions are equal. `math_answers` runs it in a process with limits.

It imports nothing of shoal, so any interpreter with `math-verify` can run it. It reads one JSON object from standard
input (`gold`, `answer`, `relative`) and writes one word. math-verify reads the LaTeX and compares expressions with
variables. Numbers, lists and brackets are compared here, because math-verify 0.9 finds some equal that differ: numbers
less than 1e-6 apart, `50%` and 50, `(1,2)` and `{1,2}`, 3 and `4 = 3`, words that are anagrams.
"""

import json
import re
import sys
from typing import Any, NamedTuple

NO_MEMORY = 77
"""Exit code if memory runs out."""


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    sys.setrecursionlimit(3_000)
    try:
        word = verdict(request["gold"], request["answer"], request["relative"])
    except MemoryError:
        sys.exit(NO_MEMORY)
    sys.stdout.write(word)


class Unreadable(Exception):
    """A text is not an expression; `args` says which one: gold or answer."""


def verdict(gold: str, answer: str, relative: float) -> str:
    """One of: right, wrong, unreadable gold, unreadable answer, deep."""
    try:
        return "right" if same(bare(gold), bare(answer), relative) else "wrong"
    except Unreadable as side:
        return f"unreadable {side}"
    except RecursionError:
        return "deep"


def same(gold: str, answer: str, relative: float) -> bool:
    """Whether two expressions are equal: brackets and lists member by member, the rest by value."""
    listed, given = members(gold), members(answer)
    if listed is not None and given is not None:
        if (listed.opening, listed.closing) != (given.opening, given.closing) or len(listed.texts) != len(given.texts):
            return False
        if listed.opening:
            return all(same(g, a, relative) for g, a in zip(listed.texts, given.texts, strict=True))
        left = list(given.texts)
        for g in listed.texts:
            match = next((a for a in left if same(g, a, relative)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    g, a = read(gold, "gold"), read(answer, "answer")
    return same_value(g, a, relative)


def same_value(g: Any, a: Any, relative: float) -> bool:
    from math_verify import verify
    from sympy import Eq, FiniteSet, Interval, Symbol, Tuple

    if isinstance(a, Eq) and not isinstance(g, Eq):  # "x = 3" for 3, and "1 + 2 = 3", but not "4 = 3"
        if not a.lhs.free_symbols and not same_value(a.lhs, a.rhs, relative):
            return False
        a = a.rhs
    elif isinstance(g, Eq) and isinstance(g.lhs, Symbol) and not isinstance(a, Eq) and not hasattr(a, "rel_op"):
        g = g.rhs
    if is_number(g) and is_number(a):
        return same_number(g, a, relative)
    kinds = {isinstance(g, FiniteSet), isinstance(a, FiniteSet)}
    if kinds == {True, False} and any(isinstance(side, Interval | Tuple) for side in (g, a)):
        return False
    return bool(verify([g], [a], float_rounding=12, timeout_seconds=None, allow_set_relation_comp=True))


def is_number(value: Any) -> bool:
    return bool(getattr(value, "is_number", False)) and not getattr(value, "free_symbols", {0})


def same_number(g: Any, a: Any, relative: float) -> bool:
    """Compares exactly, except an answer in decimals with a reference whose decimals do not end: within `relative` of
    the reference's size."""
    from sympy import Float, N, Rational, nsimplify

    rounded = a.has(Float)
    g, a = nsimplify(g, rational=True), nsimplify(a, rational=True)
    difference, size = abs(N(g - a, 60)), abs(N(g, 60))
    if not (difference.is_finite and size.is_finite):
        return bool(g == a)
    exact = not rounded or (isinstance(g, Rational) and ends(int(g.q)))
    bound = 1e-40 if exact else relative
    return bool(difference <= bound * size)


def ends(denominator: int) -> bool:
    """Whether a fraction with this denominator has finitely many decimals."""
    for factor in (2, 5):
        while denominator % factor == 0:
            denominator //= factor
    return denominator == 1


def read(text: str, side: str) -> Any:
    """An expression as math-verify reads it. Refuses several expressions: math-verify would try each."""
    from math_verify import LatexExtractionConfig, parse
    from sympy import nan, zoo

    if "$" in text or "boxed" in text or _TWO_NUMBERS.search(text):
        raise Unreadable(side)
    found = parse(
        f"${text}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    if len(found) != 1 or not hasattr(found[0], "has") or found[0].has(zoo, nan):
        raise Unreadable(side)
    return found[0]


_TWO_NUMBERS = re.compile(r"(?<!\\frac)(?<!\\frac )(?<![0-9._^])[0-9.]+\s+[0-9]")
"""Two numbers with nothing between them: TeX shows 4 2 as 42."""


# --- texts ---


def bare(text: str) -> str:
    """A formula without its delimiters, and without commands that only change how it looks."""
    text = text.strip().rstrip(".").strip()
    math = re.fullmatch(r"\$\$?([^$]+)\$\$?|\\\((.+)\\\)|\\\[(.+)\\\]", text, re.DOTALL)
    if math is not None:
        text = next(group for group in math.groups() if group is not None)
    text = re.sub(r"\\(?:left|right|displaystyle|bigl?|bigr|Big[lr]?)(?![a-zA-Z])|\\[,;!]", "", text)
    text = text.replace("\\$", "").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("\\ ", " ")
    text = re.sub(r"\\(?:mathrm|text)\s*\{\s*e\s*\}", "e", text).replace("\u2212", "-")
    return text.strip()


class Members(NamedTuple):
    """The members of a list, and its brackets. These are "" for a set or a bare list, where order does not count."""

    opening: str
    closing: str
    texts: list[str]


_WORDS = re.compile(r"\s*(?:\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def members(text: str) -> Members | None:
    """The members of a list with or without brackets; None if the text is one expression."""
    if _THOUSANDS.fullmatch(text):
        return None
    if text.startswith("\\{") and text.endswith("\\}"):
        inside = split(text[2:-2])
        return None if inside is None else Members("", "", inside)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inside = split(text[1:-1])
        if inside is not None and len(inside) > 1:
            return Members(text[0], text[-1], inside)
    found = split(_WORDS.sub(" , ", text))
    if found is None or len(found) < 2:
        return None
    symbol = re.fullmatch(r"([a-zA-Z])\s*(?:=|\\in)\s*(.+)", found[0], re.DOTALL)
    if symbol is not None and not any("=" in part for part in found[1:]):  # x = 2, 3
        found[0] = symbol[2]
    return Members("", "", found)


def split(text: str) -> list[str] | None:
    """The parts between commas and semicolons outside brackets. None if a bracket is not opened or not closed."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(r"\\[{}]|\\.|[()\[\]{},;]", text):
        if mark[0] in ("(", "[", "{", "\\{"):
            depth += 1
        elif mark[0] in (")", "]", "}", "\\}"):
            depth -= 1
            if depth < 0:
                return None
        elif mark[0] in (",", ";") and depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    parts.append(text[start:])
    stripped = [part.strip() for part in parts if part.strip()]
    return stripped if depth == 0 else None


if __name__ == "__main__":
    main()

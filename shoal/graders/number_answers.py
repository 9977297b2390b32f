"""Is the answer the right number? Exact arithmetic, with a tolerance that the author states.

A number is a sign, digits with or without thousands separators, a decimal point, an exponent,
a fraction or a mixed number, or a percentage, in plain text or in simple LaTeX. The whole answer must be one number
and at most one unit. Values are fractions of whole numbers, so no rounding decides.

Failure modes. "1,234" is 1234, even from writers who use a decimal comma; "3,5" is refused. "50%" is 0.5: if the
question asks for per cent, give `units={"%": 1}`. Words ("twelve"), formulas ("2*3") and roots are refused: use
`math_answers`. With a relative tolerance, the value 0 accepts only 0. A wide tolerance accepts guesses: at 10 %, one
guess in five of the right size passes.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from shoal.errors import ConfigError
from shoal.graders.grade import Answer, Grade, quoted, right, taken, wrong

MAX_NUMBER_CHARS = 200
"""Limit on the length of a number with its unit."""

MAX_EXPONENT = 400
"""Limit on the size of an exponent: 1e999999999 would have as many digits, and fill the memory."""

PERCENT = {"%": 0.01}
"""The accepted unit if the author names none."""


def numeric(
    answer: Answer, value: str | int | float, *, within: float = 0.0, relative: float = 0.0,
    units: Mapping[str, int | float | str] = PERCENT,
) -> Grade:  # fmt: skip
    """1 if the answer differs from the value by at most `within`, or by at most `relative` times the value's size.

    `units` gives each accepted unit in terms of the value's unit: {"km": 1, "m": "1/1000", "$": 1}. An answer without a
    unit has the value's unit. An answer with another unit is wrong.
    """
    wanted = number(str(value), units)
    if wanted is None:
        raise ConfigError(f"the reference value {value!r} is not a number, or its unit is not among {sorted(units)}")
    for name, tolerance in (("within", within), ("relative", relative)):
        if not 0.0 <= tolerance < float("inf"):
            raise ConfigError(f"{name} is {tolerance}: give a finite number from 0 up")
    found = taken(answer)
    if found.text is None:
        return wrong(found.why)
    given = number(found.text, units)
    if given is None:
        return wrong(f"{quoted(found.text)} is not one number with an accepted unit")
    if abs(given - wanted) <= max(Fraction(str(within)), Fraction(str(relative)) * abs(wanted)):
        return right(f"{quoted(found.text)} is within the tolerance")
    return wrong(f"{quoted(found.text)} is not within the tolerance")


def number(text: str, units: Mapping[str, int | float | str] = PERCENT) -> Fraction | None:
    """The value of a text that is one number, with at most one of these units. None for anything else: words, `nan`,
    `inf`, a division by zero, an exponent beyond `MAX_EXPONENT`, digits of other scripts, two numbers."""
    if len(text) > MAX_NUMBER_CHARS:  # guard: length-of-a-number
        return None
    plain, factor = _without_unit(_plain(text), units)
    match = _NUMBER.fullmatch(plain)
    if match is None:
        return None
    size = _magnitude(match)
    return None if size is None else (-size if match["sign"] == "-" else size) * factor


def _plain(text: str) -> str:
    r"""Simple LaTeX as plain text: `$\frac{1}{2}$` is 1/2, `3\times 10^{4}` is 3e4, `1{,}000` is 1,000."""
    text = text.strip().removesuffix(".").rstrip()
    math = _MATH.fullmatch(text)
    text = (math["dollars"] or math["brackets"]) if math else text
    for tex, plain in _SYMBOLS:
        text = text.replace(tex, plain)
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r" \1/\2", text)
    return re.sub(r"^([-+])\s+", r"\1", _TIMES_TEN.sub(r"e\1", text).strip())


_MATH = re.compile(r"\$(?P<dollars>[^$]+)\$|\\[(\[](?P<brackets>.+)\\[)\]]", re.DOTALL)
_TIMES_TEN = re.compile(
    r"\s{0,9}(?:\\times|\\cdot|\N{MULTIPLICATION SIGN}|\*)\s{0,9}10\s{0,9}\^\s{0,9}\{?([-+]?[0-9]+)\}?"
)
_SYMBOLS = (
    ("\N{MINUS SIGN}", "-"), ("\N{FULLWIDTH PERCENT SIGN}", "%"), ("{,}", ","), ("\\%", "%"), ("\\$", "$"), ("\\,", " "),
    ("\\!", ""), ("\\;", " "), ("\\ ", " "), ("\N{NO-BREAK SPACE}", " "), ("\N{THIN SPACE}", " "),
    ("\N{NARROW NO-BREAK SPACE}", " "),
)  # fmt: skip


def _without_unit(text: str, units: Mapping[str, int | float | str]) -> tuple[str, Fraction]:
    """A text without its unit, and the unit's factor. The unit may follow the number or precede it, as in -$5. The
    longest name wins."""
    sign, rest = (text[:1], text[1:]) if text[:1] in ("-", "+") else ("", text)
    for unit in sorted(units, key=len, reverse=True):
        if rest.endswith(unit):
            return sign + rest.removesuffix(unit).rstrip(), Fraction(str(units[unit]))
        if rest.startswith(unit):
            return sign + rest.removeprefix(unit).lstrip(), Fraction(str(units[unit]))
    return text, Fraction(1)


_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ _][0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:"
    rf"(?P<mixed>[0-9]+)\s+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<numerator>{_WHOLE})\s?/\s?(?P<denominator>-?{_WHOLE})"
    rf"|(?P<whole>{_WHOLE}?)(?:\.(?P<decimals>[0-9]*))?(?:[eE](?P<exponent>[-+]?[0-9]+))?)"
)


def _magnitude(match: "re.Match[str]") -> Fraction | None:
    """The value without its sign."""
    if match["mixed"] is not None:
        return (
            None
            if int(match["bottom"]) == 0
            else int(match["mixed"]) + Fraction(int(match["top"]), int(match["bottom"]))
        )
    if match["numerator"] is not None:
        bottom = _digits(match["denominator"])
        return None if bottom == 0 else Fraction(_digits(match["numerator"]), bottom)
    decimals = match["decimals"] or ""
    if not match["whole"] and not decimals:
        return None
    exponent = match["exponent"] or "0"
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:  # guard: exponent-size
        return None
    return Fraction(f"{_digits(match['whole'] or '0')}.{decimals or '0'}") * Fraction(10) ** int(exponent)


def _digits(text: str) -> int:
    return int(text.replace(",", "").replace(" ", "").replace("_", ""))

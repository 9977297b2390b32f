r"""Is the answer mathematically equal to the reference? LaTeX or plain formulas: numbers, expressions, sets,
intervals, matrices.

If comparing texts or numbers settles the question, that is done here. The rest goes to `math_worker`, which uses
math-verify and sympy (the extra `math`) in a process with limits of time and memory, because sympy may hang on an
answer such as 9^{9^{9^9}}. `run` says where that process is: `in_child`, or a sandbox whose interpreters have imported
math_verify.

At a limit the answer is *undecided*: its score is 0, but it is not called wrong. An answer that math-verify cannot read
is wrong. If it cannot read the reference, every answer is undecided, so check yours with `readable`.

Failure modes (measured in tests/graders/pairs.py). It refuses: equations in another form unless sympy can
rearrange them, mixed numbers in LaTeX, units, words. It accepts: an unsimplified form ("2+1" for 3), so a question
that asks to simplify or to factor needs a check of the form; a value rounded to a relative 1e-6 if the decimals of the
reference do not end. Order counts in `(1,2)`, not in `1, 2` or `\{1,2\}`.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

from shoal.errors import ConfigError, how_to_install
from shoal.graders import math_worker
from shoal.graders.grade import Answer, Grade, quoted, reference, right, taken, undecided, wrong
from shoal.graders.number_answers import number
from shoal.graders.programs import ProgramLimits, ProgramRunner, in_child
from shoal.graders.text import normalised

MAX_FORMULA_CHARS = 500
"""Limit on the length of an answer. Final answers are short, and the time to read one grows faster than its length."""

LIMITS = ProgramLimits(time_s=5.0, memory_mb=1024, output_bytes=4096)


def mathematics(
    answer: Answer, gold: str, *, relative: float = 1e-6, run: ProgramRunner = in_child, limits: ProgramLimits = LIMITS
) -> Grade:
    """1 if the two are equal. `relative` bounds the rounding error of an answer in decimals."""
    gold = reference(gold)
    found = taken(answer, MAX_FORMULA_CHARS)
    if found.text is None:
        return wrong(found.why)
    shown = quoted(found.text)
    if _squeezed(found.text) == _squeezed(gold):
        return right(f"{shown} is the reference")
    wanted, given = number(gold), number(found.text)
    if wanted is not None and given is not None and (wanted == given or math_worker.ends(wanted.denominator)):
        return (right if wanted == given else wrong)(f"{shown} and the reference were compared as numbers")
    if _WORDS.fullmatch(gold):  # guard: words-are-no-products
        same = normalised(_untexted(found.text)) == normalised(_untexted(gold))
        return (right if same else wrong)(f"{shown} and the reference were compared as words")
    return _graded(shown, {"gold": gold, "answer": found.text, "relative": relative}, run, limits)


def readable(gold: str, run: ProgramRunner = in_child) -> bool:
    """Whether math-verify can read a reference answer. Authors check each of a data set once."""
    asked = {"gold": reference(gold), "answer": gold, "relative": 0.0}
    return (
        bool(_WORDS.fullmatch(gold.strip())) or run(_program(), json.dumps(asked).encode(), LIMITS).stdout == b"right"
    )


def _graded(shown: str, request: dict[str, object], run: ProgramRunner, limits: ProgramLimits) -> Grade:
    ran = run(_program(), json.dumps(request).encode(), limits)
    if ran.outcome != "ended":
        return undecided(f"{shown} was not compared: limit of {ran.outcome}")
    verdicts: dict[bytes, Callable[[str], Grade]] = {
        b"right": right,
        b"wrong": wrong,
        b"unreadable answer": wrong,
        b"deep": wrong,
    }
    if ran.exit == 0 and ran.stdout in verdicts:
        return verdicts[ran.stdout](f"{shown}: {ran.stdout.decode()}")
    if ran.stdout == b"unreadable gold":
        return undecided("the reference answer cannot be read")
    if b"No module named 'math_verify'" in ran.stderr:
        raise ConfigError(f"math-verify is not installed: {how_to_install('math')}")
    return undecided(f"{shown} was not compared: the program ended with exit code {ran.exit}")


@functools.cache
def _program() -> bytes:
    return Path(math_worker.__file__).read_bytes()


_WORDS = re.compile(r"\\text\s*\{[^{}]*[A-Za-z]{2}[^{}]*\}|[A-Za-z][A-Za-z ]{2,}[A-Za-z]")
"""A reference in words. sympy would read it as a product of letters, which is equal to every anagram."""


def _squeezed(text: str) -> str:
    """A formula without white space, except between two digits: 4 2 is not 42."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", math_worker.bare(text))


def _untexted(text: str) -> str:
    return re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text)

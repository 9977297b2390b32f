r"""Pairs of a reference and an answer, equal or not, with what is known to go wrong: the measurement of `mathematics`.

    python -m tests.graders.pairs       prints false positives and false negatives, ours and math-verify's alone

`math-verify alone` is how it is used commonly: both sides in dollar signs, `parse`, then `verify`, with its defaults.
"""

import json
from typing import NamedTuple

from shoal.graders import math_worker
from shoal.graders.math_answers import mathematics
from shoal.graders.programs import ProgramLimits, ProgramResult


class Pair(NamedTuple):
    gold: str
    answer: str
    equal: bool
    missed: bool = False
    """Whether `mathematics` is known to say the opposite."""


EQUAL = (
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "1/2"),
    ("\\frac12", "0.50"),
    ("1,000", "1000"),
    ("1000", "10^3"),
    ("0.25", "25\\%"),
    ("50\\%", "\\frac{1}{2}"),
    ("-3", "\u22123"),
    ("3", "x = 3"),
    ("x=3", "3"),
    ("2", "\\sqrt{4}"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("2\\pi", "6.2831853"),
    ("\\frac{1}{3}", "0.33333333"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(x-1)(x+1)", "x^2-1"),
    ("\\sin^2 x+\\cos^2 x", "1"),
    ("2x+3", "3+2x"),
    ("e^{x+1}", "e \\cdot e^x"),
    ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}"),
    ("(1,2)", "\\left(1, 2\\right)"),
    ("(\\frac12, 3)", "(0.5, 3)"),
    ("\\{1,2,3\\}", "\\{3,1,2\\}"),
    ("1, 2, 3", "3, 2, 1"),
    ("1, 2", "1 \\text{ and } 2"),
    ("2, 3", "x = 2 or 3"),
    ("(-\\infty, 3)", "x < 3"),
    ("[0, 1)", "0 \\le x < 1"),
    ("(-\\infty,1)\\cup(2,\\infty)", "(2,\\infty) \\cup (-\\infty,1)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("3+4i", "4i+3"),
    ("\\pm 3", "3, -3"),
    ("\\text{Evelyn}", "Evelyn"),
    ("\\text{even}", "\\text{ even }"),
    ("\\binom{5}{2}", "10"),
    ("5!", "120"),
    ("\\log_2 8", "3"),
    ("\\ln e^2", "2"),
    ("1 - \\frac{1}{\\mathrm{e}}", "1 - e^{-1}"),
    ("90", "90^\\circ"),
    ("x > 2", "2 < x"),
    ("y = 2x + 1", "y = 1 + 2x"),
    ("34x+45y-20z+100=0", "-34x-45y+20z-100=0"),
    ("2^{99}", "633825300114114700748351602688"),
    ("\\frac{1}{2^{99}}", "2^{-99}"),
    ("\\infty", "+\\infty"),
    ("0.\\overline{3}", "\\frac13"),
    ("\\tan 45^\\circ", "1"),
    ("1\\frac{1}{2}", "\\frac{3}{2}"),
    ("\\$18", "18"),
    ("5\\text{ cm}", "5"),
    ("2x+4y-3=0", "y = -\\frac{1}{2}x + \\frac{3}{4}"),
    ("\\emptyset", "\\{\\}"),
)

DIFFERENT = (
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("0.0000001", "0"),
    ("0.0000001", "0.0000002"),
    ("2^{99}", "2^{99}+1"),
    ("50\\%", "50"),
    ("12:00", "1:00"),
    ("(2,1)", "(5,3)"),
    ("(1,2)", "\\{1,2\\}"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "0 < x < 1"),
    ("4", "4\\sqrt{2}"),
    ("\\pm 2021", "2021"),
    ("3", "4 = 3"),
    ("2", "2 or 3"),
    ("2", "2, 3"),
    ("2", "\\{2\\} \\cup \\{3\\}"),
    ("1, 2, 3", "1, 2"),
    ("1, 2", "1, 2, 3"),
    ("19, 46, 82", "21, 36, 82"),
    ("x", "y"),
    ("x+1", "y+1"),
    ("x^2", "x^3"),
    ("\\text{evil}", "\\text{vile}"),
    ("even", "odd"),
    ("evil", "vile"),
    ("0.333", "1/3"),
    ("\\frac13", "0.33"),
    ("2\\pi", "6.28"),
    ("3.14", "\\pi"),
    ("1000000", "1000000.5"),
    ("-3", "3"),
    ("10", "1010_2"),
    ("3x-y+13=0", "3x+4y+14=0"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("3+4i", "3-4i"),
    ("\\infty", "-\\infty"),
    ("x > 2", "x \\ge 2"),
    ("(-\\infty,1)\\cup(2,\\infty)", "(-\\infty,1]\\cup(2,\\infty)"),
    ("1 - \\frac{1}{e}", "1 + \\frac{1}{e}"),
    ("n=2, 3, 4", "n=1, 2, 3"),
    ("D = (0, 1)", "D = (0, 1.5)"),
    ("5", "5\\text{ or }6"),
    ("5", "$5$ or $6$"),
    ("7", "\\boxed{7}\\boxed{8}"),
    ("0", "x"),
    ("0", "\\emptyset"),
    ("x^2", "x^2 + 10^{-9}"),
    ("1/3", "1/3 \\text{ or } 2/3"),
    ("42", "4 2"),
    ("2x", "x"),
)

MISSED = {("0.\\overline{3}", "\\frac13"), ("\\tan 45^\\circ", "1")}

PAIRS = tuple(
    Pair(gold, answer, equal, (gold, answer) in MISSED)
    for equal, pairs in ((True, EQUAL), (False, DIFFERENT))
    for gold, answer in pairs
)


def here(program: bytes, stdin: bytes, limits: ProgramLimits) -> ProgramResult:
    """Compare in this process, which loads sympy once."""
    request = json.loads(stdin)
    return ProgramResult(
        math_worker.verdict(request["gold"], request["answer"], request["relative"]).encode(), b"", 0, "ended"
    )


def alone(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(f"${gold}$"), parse(f"${answer}$")))


def main() -> None:
    for name, judge in (
        ("mathematics", lambda g, a: mathematics(a, g, run=here).score == 1.0),
        ("math-verify alone", alone),
    ):
        wrong = [pair for pair in PAIRS if judge(pair.gold, pair.answer) != pair.equal]
        for pair in wrong:
            print(f"{name}: false {'negative' if pair.equal else 'positive'}: {pair.gold}   {pair.answer}")
        negatives = sum(pair.equal for pair in wrong)
        positives = len(wrong) - negatives
        print(
            f"{name}: {negatives} of {len(EQUAL)} equal pairs refused, {positives} of {len(DIFFERENT)} others accepted"
        )


if __name__ == "__main__":
    main()

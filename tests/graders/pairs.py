r"""Pairs of a reference and an answer, equal or not, with what is known to go wrong: the measurement of `mathematics`."""

import json
from typing import NamedTuple

from shoal.graders import math_worker
from shoal.graders.programs import ProgramLimits, ProgramResult


class Pair(NamedTuple):
    gold: str
    answer: str
    equal: bool
    missed: bool = False
    """Whether `mathematics` is known to say the opposite."""


EQUAL = (
    ("1\\frac{1}{2}", "\\frac{3}{2}"),
    ("3", "x = 3"),
    ("\\frac12", "0.50"),
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "1/2"),
    ("1,000", "1000"),
    ("1000", "10^3"),
    ("0.25", "25\\%"),
    ("50\\%", "\\frac{1}{2}"),
    ("-3", "\u22123"),
    ("x=3", "3"),
    ("2", "\\sqrt{4}"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("2\\pi", "6.2831853"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\sin^2 x+\\cos^2 x", "1"),
    ("e^{x+1}", "e \\cdot e^x"),
    ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}"),
    ("(\\frac12, 3)", "(0.5, 3)"),
    ("\\{1,2,3\\}", "\\{3,1,2\\}"),
    ("1, 2", "1 \\text{ and } 2"),
    ("2, 3", "x = 2 or 3"),
    ("(-\\infty, 3)", "x < 3"),
    ("[0, 1)", "0 \\le x < 1"),
    ("(-\\infty,1)\\cup(2,\\infty)", "(2,\\infty) \\cup (-\\infty,1)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("\\pm 3", "3, -3"),
    ("\\text{Evelyn}", "Evelyn"),
    ("\\binom{5}{2}", "10"),
    ("5!", "120"),
    ("\\log_2 8", "3"),
    ("1 - \\frac{1}{\\mathrm{e}}", "1 - e^{-1}"),
    ("90", "90^\\circ"),
    ("x > 2", "2 < x"),
    ("34x+45y-20z+100=0", "-34x-45y+20z-100=0"),
    ("2^{99}", "633825300114114700748351602688"),
    ("\\infty", "+\\infty"),
    ("0.\\overline{3}", "\\frac13"),
    ("\\tan 45^\\circ", "1"),
    ("\\$18", "18"),
    ("5\\text{ cm}", "5"),
    ("2x+4y-3=0", "y = -\\frac{1}{2}x + \\frac{3}{4}"),
    ("\\emptyset", "\\{\\}"),
)

DIFFERENT = (
    ("19, 46, 82", "21, 36, 82"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    ("0.0000001", "0.0000002"),
    ("2^{99}", "2^{99}+1"),
    ("50\\%", "50"),
    ("12:00", "1:00"),
    ("(2,1)", "(5,3)"),
    ("(1,2)", "\\{1,2\\}"),
    ("(1,2)", "[1,2]"),
    ("4", "4\\sqrt{2}"),
    ("\\pm 2021", "2021"),
    ("3", "4 = 3"),
    ("2", "2 or 3"),
    ("2", "\\{2\\} \\cup \\{3\\}"),
    ("1, 2", "1, 2, 3"),
    ("x", "y"),
    ("even", "odd"),
    ("evil", "vile"),
    ("\\frac13", "0.33"),
    ("2\\pi", "6.28"),
    ("1000000", "1000000.5"),
    ("10", "1010_2"),
    ("3x-y+13=0", "3x+4y+14=0"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("\\infty", "-\\infty"),
    ("x > 2", "x \\ge 2"),
    ("(-\\infty,1)\\cup(2,\\infty)", "(-\\infty,1]\\cup(2,\\infty)"),
    ("D = (0, 1)", "D = (0, 1.5)"),
    ("5", "$5$ or $6$"),
    ("7", "\\boxed{7}\\boxed{8}"),
    ("0", "x"),
    ("0", "\\emptyset"),
    ("x^2", "x^2 + 10^{-9}"),
    ("42", "4 2"),
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

"""Extraction, exact, numeric and choice: what they read, what they refuse, and how they fail."""

import time
from collections.abc import Callable
from fractions import Fraction

import pytest

from shoal.errors import ConfigError
from shoal.graders.extract import after_marker, final_line, last_boxed, last_code, last_number, tagged
from shoal.graders.grade import Extraction, Grade, partly, taken, wrong
from shoal.graders.number_answers import number, numeric
from shoal.graders.text import choice, exact


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (last_boxed(r"so \boxed{\frac{1}{2}}"), r"\frac{1}{2}"),
        (last_boxed(r"\boxed{\{1,2\}}"), r"\{1,2\}"),
        (after_marker("The final answer: 4\nI hope this helps.", "final answer:"), "4"),
        (tagged("<result>x</result>", "result"), "x"),
        (last_number("3 of 4 is 3/4"), "3/4"),
        (last_number("x=-7.5e3."), "-7.5e3"),
        (final_line("# Title\n\n- **Paris**\n\n"), "Paris"),
        (last_code("```\nx = 1\n```\n```c\nint x;\n```"), "x = 1\n"),
    ],
)
def test_the_answer_is_found(found: Extraction, text: str) -> None:
    assert found.text == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (last_number("12 eggs, in 3 steps"), "3"),
        (last_number("3,5"), "5"),
        (after_marker("Answer: 4\nNo, it is 5."), "4"),
        (final_line("Paris\nI hope this helps."), "I hope this helps."),
    ],
)
def test_what_an_extractor_misreads_is_as_documented(found: Extraction, text: str) -> None:
    assert found.text == text


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 100_000,
        "Answer: " * 100_000,
        "<answer>" * 100_000,
        "9" * 900_000,
        "</think>" * 100_000,
        "```\n" * 99_999,
        "```a\n" * 99_999,
        "*" * 900_000 + "x",
    ],
)
def test_hostile_texts_take_little_time(text: str) -> None:
    began = time.process_time()
    for extract in (last_boxed, after_marker, tagged, last_number, final_line, last_code):
        extract(text)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("text", ["'" * 9_990 + "x", "$ " * 4_990 + "x", "." * 9_990 + "x"])
def test_hostile_answers_take_little_time(text: str) -> None:
    began = time.process_time()
    assert exact(text, "y").score == choice(text, "A", ["y", "z"]).score == numeric(text, 5).score == 0.0
    assert time.process_time() - began < 0.5


def test_a_text_beyond_the_limit_has_no_answer() -> None:
    assert last_boxed("x" * 1_000_000 + r"\boxed{5}").text is None


def test_an_answer_beyond_the_limit_is_none() -> None:
    assert taken("x" * 10_000).text is not None
    assert taken("x" * 10_001).text is None


def test_an_unpaired_surrogate_is_not_an_answer() -> None:
    assert taken("\ud800").text is None
    assert exact("\ud800", "x").score == 0.0


def test_reasons_are_one_short_line_without_controls() -> None:
    reason = wrong("\x1b[2J a\nb " + "x" * 1000).reason
    assert reason.isprintable() and len(reason) == 200


def test_a_score_outside_its_range_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        partly(1.5, "")
    with pytest.raises(AssertionError):
        partly(float("nan"), "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", Fraction(2469, 2)), ("-$5", Fraction(-5)), (r"-\frac{1}{2}", Fraction(-1, 2)), (".5", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)), ("12 345", Fraction(12345)), ("50%", Fraction(1, 2)), (r"2\cdot 10^3", Fraction(2000)),
        ("1,23", None), ("1.2.3", None), ("", None), ("-", None), ("1e401", None), ("٣", None), ("²", None), ("1/0", None),
        ("nan", None), ("infinity", None), ("2 3", None), ("five", None), ("0x10", None), ("1_0", None), ("--5", None),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly(text: str, value: Fraction | None) -> None:
    assert number(text, {"%": 0.01, "$": 1}) == value


@pytest.mark.parametrize(
    ("grade", "says"),
    [
        *((lambda reference=reference: exact("anything", reference), "empty") for reference in ("", "  ", "...", "$$")),
        (lambda: exact("anything"), "at least one"),
        *(
            (lambda within=within: numeric("5", 5, within=within), "finite")
            for within in (-1.0, float("nan"), float("inf"))
        ),
        (lambda: numeric("5", "nan"), "not a number"),
        (lambda: choice("E", "E", ["a", "b"]), "must be one of the options"),
    ],
)
def test_a_reference_or_a_tolerance_that_nobody_can_meet_is_refused(grade: Callable[[], Grade], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        grade()


SAME = {"A": "yes", "B": "yes"}


@pytest.mark.parametrize(
    ("graded", "score"),
    [
        (exact("us", "US"), 1.0),
        (exact("us", "US", case=True), 0.0),
        (numeric("5.1", 5, within=0.1), 1.0),
        (numeric("5.10000000000000000001", 5, within=0.1), 0.0),
        (numeric("110", 100, relative=0.1), 1.0),
        (numeric("0.0000001", 0, relative=0.5), 0.0),
        (choice("yes", "A", SAME), 0.0),
        (choice("A", "A", SAME), 1.0),
        (choice("B", "B", {"A": "b", "B": "c"}), 0.0),
    ],
)
def test_case_tolerances_and_ambiguous_options(graded: Grade, score: float) -> None:
    assert graded.score == score

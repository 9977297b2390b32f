"""What every grader of answers takes and returns: an answer found in a text, and a grade with its reason.

A grader is a function: it keeps no state, and the same arguments give the same grade. Exceptions are the graders that
start a process, ask a model or ask a person; their docstrings say so.
"""

import math
from typing import NamedTuple, TypeAlias

from shoal.errors import ConfigError
from shoal.terminal import printable

MAX_ANSWER_CHARS = 10_000
"""Limit on the length of an answer. A longer one is a list of guesses, or an attempt to slow a grader down."""

MAX_REASON_CHARS = 200
"""Limit on the length of a reason: one line of a log."""

MAX_QUOTED_CHARS = 60
"""How much of a text a reason quotes."""


class Grade(NamedTuple):
    """What a grader says about an answer."""

    score: float
    """From 0 to 1."""
    reason: str
    """One line, for the author and the log. It may quote the policy, so never show it to the policy."""
    decided: bool = True
    """False if a limit or a fault kept the grader from deciding. The score is then 0, so that it does not pay to
    break the grader. But it is evidence against nobody: on another machine the grader might have decided."""


class Extraction(NamedTuple):
    """What an extractor found in a text."""

    text: str | None
    """The answer; None if there is none, or if several texts could be meant."""
    why: str
    """Where it was, or why there is none."""


Answer: TypeAlias = str | Extraction
"""What graders take: a text that is the answer, or what an extractor returned."""


def right(reason: str) -> Grade:
    return Grade(1.0, _one_line(reason))


def wrong(reason: str) -> Grade:
    return Grade(0.0, _one_line(reason))


def partly(score: float, reason: str) -> Grade:
    """A grade between 0 and 1. Anything else is a fault of the grader."""
    assert math.isfinite(score) and 0.0 <= score <= 1.0, score
    return Grade(score, _one_line(reason))


def undecided(reason: str) -> Grade:
    return Grade(0.0, _one_line(reason), decided=False)


def taken(answer: Answer, max_chars: int = MAX_ANSWER_CHARS) -> Extraction:
    """The answer without the white space around it. None if it is missing, empty, too long or not text."""
    found = Extraction(answer, "the whole text") if isinstance(answer, str) else answer
    if found.text is None:
        return found
    text = found.text.strip()
    if not text:
        return Extraction(None, "the answer is empty")
    if len(text) > max_chars:  # guard: answer-length
        return Extraction(None, f"the answer has {len(text):,} characters, limit {max_chars:,}")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return Extraction(None, "the answer contains an unpaired surrogate")
    return Extraction(text, found.why)


def quoted(text: str) -> str:
    """A text for a reason: short, in quotation marks, and without characters that control a terminal."""
    cut = text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "..."
    return f'"{cut}"'


def reference(text: str) -> str:
    """The author's reference answer. Raises `ConfigError` if it is empty, because every empty answer would be right."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"the reference answer {text!r} is not a text or is empty: give a text, or drop the task")
    return text.strip()


def _one_line(reason: str) -> str:
    line = printable(" ".join(reason.split()))
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."

"""Does the answer match the author's regular expression? For forms: dates, codes, identifiers.

Called by environments. The engine is RE2. Its time grows linearly with the text, so a hostile answer cannot make it
hang. It is in the extra `answers`, and imported when a pattern is first used.

Failure modes. RE2 has no look-around and no back-references, so patterns that use them are refused. `\\d` is an ASCII
digit, and `\\z` is the end of the text, which Python writes `\\Z`. The whole answer must match: a search for a part
would reward an answer that lists every candidate. A pattern checks the form, never whether the content is true.
"""

import functools
from typing import Any

from shoal.envs.answers.graded import Answer, Graded, quoted, right, taken, wrong
from shoal.errors import ConfigError, how_to_install

MAX_PATTERN_CHARS = 2_000
"""Limit on the length of a pattern."""

MAX_PROGRAM_BYTES = 8 << 20
"""Memory that RE2 may use for a pattern. A larger pattern is refused."""


def matches(answer: Answer, pattern: str) -> Graded:
    """1 if the pattern matches the whole answer. `(?i)` at its start ignores case, `(?s)` lets a dot match a newline."""
    compiled = _compiled(pattern)
    found = taken(answer)
    if found.text is None:
        return wrong(found.why)
    if compiled.fullmatch(found.text) is None:  # guard: whole-answer-matches
        return wrong(f"{quoted(found.text)} does not match {quoted(pattern)}")
    return right(f"{quoted(found.text)} matches {quoted(pattern)}")


@functools.lru_cache(64)
def _compiled(pattern: str) -> Any:
    try:
        import re2
    except ModuleNotFoundError:
        raise ConfigError(f"google-re2 is not installed: {how_to_install('answers')}") from None
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ConfigError(f"the pattern has {len(pattern):,} characters, limit {MAX_PATTERN_CHARS:,}: shorten it")
    options = re2.Options()
    options.max_mem, options.log_errors = MAX_PROGRAM_BYTES, False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(
            f"the pattern {pattern[:80]!r} is refused: {why}. RE2 has no look-around and no back-references: rewrite it"
        ) from None

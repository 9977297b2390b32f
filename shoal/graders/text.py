"""Graders of texts: accepted texts, lettered choices, regular expressions, and JSON by a schema.

The docstring of each says which right answers it refuses, and which wrong ones it accepts.
"""

import functools
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import ConfigError, how_to_install
from shoal.graders.grade import Answer, Grade, quoted, reference, right, taken, wrong

MAX_PATTERN_CHARS = 2_000
"""Limit on the length of a pattern."""

MAX_PROGRAM_BYTES = 8 << 20
"""Memory that RE2 may use for a pattern. A larger pattern is refused."""

MAX_JSON_CHARS = 100_000
"""Limit on the length of a document."""

MAX_DEPTH = 32
"""Limit on the depth to which lists and objects are nested."""


def exact(answer: Answer, *accepted: str, case: bool = False) -> Grade:
    """1 if the answer is one of the accepted texts. For names, words, short phrases and codes.

    Both sides are normalised in the same way; nothing else is equal:

    - the text takes Unicode form NFC; full-width letters and digits become ASCII; curly quotes, long dashes and the minus
      sign become plain;
    - letters lose their case, unless `case` is true;
    - characters that do not print, such as zero-width spaces, are dropped, and each run of white space becomes one space;
    - quotation marks, `$` and the marks of bold type around the whole text are dropped, and so are full stops at its end.

    Failure modes. It refuses right answers in other words, or with an article, a unit or an explanation: list what you
    accept, or use another grader. It takes answers for equal that differ only in case or final stops ("us" and "US").
    Look-alike letters of other alphabets count as different.
    """
    if not accepted:
        raise ConfigError("there is no reference answer: give at least one accepted text")
    wanted = {normalised(reference(text), case): text for text in accepted}
    if "" in wanted:  # guard: empty-reference
        raise ConfigError(f"the reference answer {wanted['']!r} is empty after normalising: give letters or digits")
    found = taken(answer)
    if found.text is None:
        return wrong(found.why)
    if normalised(found.text, case) in wanted:
        return right(f"{quoted(found.text)} is accepted")
    return wrong(f"{quoted(found.text)} is not an accepted text")


def normalised(text: str, case: bool = False) -> str:
    """A text as `exact` compares it."""
    plain = unicodedata.normalize("NFC", text).translate(_PLAIN)
    shown = "".join(c for c in plain if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc", "Cs"))
    shown = " ".join(shown.split())
    bare = shown.lstrip(_AROUND).rstrip(_AROUND + ".")
    return bare if case else bare.casefold()


_PLAIN = {0xFF01 + i: 0x21 + i for i in range(94)} | {
    ord("\N{IDEOGRAPHIC SPACE}"): " ",
    **dict.fromkeys(map(ord, "\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}"), "'"),
    **dict.fromkeys(map(ord, "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"), '"'),
    **dict.fromkeys(map(ord, "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"), "-"),
}
_AROUND = " \"'`*_$"


# --- lettered choices ---


def choice(answer: Answer, letter: str, options: Mapping[str, str] | Sequence[str]) -> Grade:
    """1 if the answer names the option of this letter, and no other. Options without letters get A, B, C and so on.

    It accepts the letter in its usual forms ("B", "(B)", "B.", "**B**", "option B", "the answer is B"), the letter with
    the text of its option, and the text alone if only one option has it.

    Failure modes. It refuses a letter with an explanation ("B because ..."): extract the letter first. An answer that is
    the letter of one option and the text of another is ambiguous, and refused. A guess among four options is right one
    time in four, so a mean reward of 1/4 shows no knowledge.
    """
    lettered = dict(options) if isinstance(options, Mapping) else {chr(65 + i): text for i, text in enumerate(options)}
    texts = {name.upper(): normalised(text) for name, text in lettered.items()}
    if letter.upper() not in texts or not all(len(name) == 1 and name.isascii() for name in texts):
        raise ConfigError(
            f"the reference choice {letter!r} must be one of the options {sorted(texts)}, each named by one ASCII letter"
        )
    found = taken(answer)
    if found.text is None:
        return wrong(found.why)
    chosen = _chosen(found.text, texts)
    if len(chosen) != 1:
        return wrong(f"{quoted(found.text)} names {len(chosen)} options, not one")
    return (right if chosen == {letter.upper()} else wrong)(f"{quoted(found.text)} names option {min(chosen)}")


def _chosen(text: str, texts: Mapping[str, str]) -> set[str]:
    """The options that an answer names: none if it has no known form, or if its letter and text are of two options."""
    plain = normalised(_TEX.sub(r"\1", text))
    chosen = {name for name, option in texts.items() if option == plain}
    match = _LETTER.fullmatch(plain)
    if match is not None and match["letter"].upper() in texts:
        name, said = match["letter"].upper(), normalised(match["text"] or "")
        if not said or said == texts[name]:  # guard: letter-with-its-text
            chosen.add(name)
    return chosen


_TEX = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_LETTER = re.compile(
    r"(?:(?:the )?(?:correct |final )?(?:answer|option|choice)(?: is)?:? ?)?(?:option |choice )?"
    r"[\[(*]{0,3}(?P<letter>[a-z0-9])[\])*]{0,3}(?:[.:)\-]{0,2}(?: (?P<text>.+))?)?",
    re.DOTALL,
)


# --- regular expressions ---


def matches(answer: Answer, pattern: str) -> Grade:
    """1 if the author's regular expression matches the whole answer. For forms: dates, codes, identifiers.

    `(?i)` at its start ignores case, `(?s)` lets a dot match a newline. The engine is RE2. Its time grows linearly with
    the text, so a hostile answer cannot make it hang. It is in the extra `answers`, and imported when it is first used.

    Failure modes. RE2 has no look-around and no back-references, so patterns that use them are refused. `\\d` is an ASCII
    digit, and `\\z` is the end of the text, which Python writes `\\Z`. The whole answer must match: a search for a part
    would reward an answer that lists every candidate. A pattern checks the form, never whether the content is true.
    """
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


# --- JSON ---


def conforms(answer: Answer, schema: dict[str, Any]) -> Grade:
    """1 if the answer is one JSON document that the schema allows. A `$ref` may point into the schema only.

    The document must be all of the answer, without `NaN` and without repeated keys, and limited in size and depth. A `json`
    fence around the whole answer is removed. jsonschema-rs, which is in the extra `answers`, checks the schema: its
    patterns take linear time, and it fetches nothing. (jsonschema and fastjsonschema pass `pattern` to Python's engine,
    which a hostile answer can make hang; the latter also generates code from the schema.)

    Failure modes. A schema checks the form, never whether the content is true: an empty object passes unless the schema
    requires members, and unknown members pass unless it forbids them. `1.0` is an integer, as the standard says.
    """
    validator = _validator(json.dumps(schema, sort_keys=True))
    document, fault = read_json(answer)
    if fault:
        return wrong(fault)
    # is_valid remembers what it has compared. The other methods collect every error: many, if a schema is recursive.
    return right("the document conforms") if validator.is_valid(document) else wrong("the document does not conform")


def read_json(answer: Answer) -> tuple[Any, str]:
    """The document of an answer, and "". If there is none: None, and why."""
    found = taken(answer, MAX_JSON_CHARS)
    if found.text is None:
        return None, found.why
    text = _unfenced(found.text)
    if _depth(text) > MAX_DEPTH:  # guard: depth-of-an-answer
        return None, f"the document is deeper than {MAX_DEPTH}"
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refused, parse_float=_finite), ""
    except (ValueError, RecursionError) as error:
        return None, f"the answer is not one JSON document: {error}"


@functools.lru_cache(64)
def _validator(schema: str) -> Any:
    try:
        import jsonschema_rs
    except ModuleNotFoundError:
        raise ConfigError(f"jsonschema-rs is not installed: {how_to_install('answers')}") from None
    offline = True  # guard: schema-fetches-nothing
    linear = jsonschema_rs.RegexOptions()
    try:
        return jsonschema_rs.validator_for(
            json.loads(schema), pattern_options=linear, validate_formats=True, offline=offline
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ConfigError(f"the schema is refused: {' '.join(str(error).split())[:300]}") from None


def _unfenced(text: str) -> str:
    fence = re.fullmatch(r"```(?:json)?[ \t]*\n(.*)\n```", text, re.DOTALL)
    return fence[1] if fence else text


def _depth(text: str) -> int:
    """An upper bound on the depth of a document: brackets in a string that is not closed count, too."""
    depth = most = 0
    for mark in re.finditer(r'"(?:[^"\\]|\\.|\\\Z)*+(?:"|\Z)|[\[{]|[\]}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        most = max(most, depth)
    return most


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):  # guard: json-key-twice
        raise ValueError("a key occurs twice")
    return members


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value

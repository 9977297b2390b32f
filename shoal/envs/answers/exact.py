"""Is the answer one of the accepted texts? For names, words, short phrases and codes.

Called by environments. Both sides are normalised in the same way; nothing else is equal:

- the text takes Unicode form NFC; full-width letters and digits become ASCII; curly quotes, long dashes and the minus
  sign become plain;
- letters lose their case, unless `case` is true;
- characters that do not print, such as zero-width spaces, are dropped, and each run of white space becomes one space;
- quotation marks, `$` and the marks of bold type around the whole text are dropped, and so are full stops at its end.

Failure modes. It refuses right answers in other words, or with an article, a unit or an explanation: list what you
accept, or use another verifier. It takes answers for equal that differ only in case or final stops ("us" and "US").
Look-alike letters of other alphabets count as different.
"""

import unicodedata

from shoal.envs.answers.graded import Answer, Graded, quoted, reference, right, taken, wrong
from shoal.errors import ConfigError


def exact(answer: Answer, *accepted: str, case: bool = False) -> Graded:
    """1 if the normalised answer equals one of the normalised accepted texts."""
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

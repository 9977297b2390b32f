"""Find the final answer in what a policy wrote: one function for each form that a prompt may ask for.

Each docstring says what its function misreads. All share two rules:

- **Thinking is not the answer.** Only the text after the last `</think>` counts. If thinking begins and does not end,
  there is no answer.
- **One answer.** If the form occurs several times with different contents, there is no answer: a policy must not be
  paid for listing its guesses. The same content twice is one answer.

Pass only what the policy wrote in its last turn, never the whole conversation: the prompt often shows the form.
"""

import re
from collections.abc import Sequence

from shoal.graders.grade import Extraction, quoted

MAX_TEXT_CHARS = 1_000_000
"""Limit on the length of a text. No turn of a policy is that long."""


def last_boxed(text: str) -> Extraction:
    r"""The content of `\boxed{...}`, with balanced braces.

    Misreads: several boxes for the parts of one answer (ask for one box); boxed intermediate results of a model that
    does not think inside `<think>`; a box without braces, as in `\boxed 5`.
    """
    part = _final(text)
    if part.text is None:
        return part
    contents: list[str] = []
    at = 0
    while (opening := _BOX.search(part.text, at)) is not None:
        end = _closing_brace(part.text, opening.end())
        if end is None:
            return Extraction(None, "the last box is not closed")
        contents.append(part.text[opening.end() : end])
        at = end + 1
    return _only(contents, r"\boxed")


def after_marker(text: str, marker: str = "Answer:") -> Extraction:
    """The rest of the line after a marker, or the next line with text if that is empty. The marker's case is ignored.

    Misreads: an answer of several lines; a marker that the policy mentions before it answers ("I will write Answer: and
    then ..."), which counts as a second answer; what the policy adds or takes back on later lines.
    """
    part = _final(text)
    if part.text is None:
        return part
    pieces = re.split(re.escape(marker), part.text, flags=re.IGNORECASE)[1:]
    return _only([_first_line(piece) for piece in pieces], quoted(marker))


def tagged(text: str, tag: str = "answer") -> Extraction:
    """The content of `<answer>...</answer>`, or of another tag.

    Misreads: a tag that the policy mentions while it explains what it does; a tag in another case, or with attributes.
    """
    part = _final(text)
    if part.text is None:
        return part
    opening, closing = f"<{tag}>", f"</{tag}>"
    pieces = part.text.split(opening)[1:]
    if any(piece.count(closing) != 1 for piece in pieces):  # guard: tags-are-paired
        return Extraction(None, f"a {opening} is not closed exactly once")
    return _only([piece.partition(closing)[0] for piece in pieces], opening)


def last_number(text: str) -> Extraction:
    """The last number of the text.

    Misreads: a number after the answer ("12, in 3 steps" gives 3); a unit, a sign or a fraction in words; a decimal
    comma ("3,5" gives 5). "5 or 6" gives no answer; other ways to name two numbers give the last. Prefer a form that
    the policy writes on purpose.
    """
    part = _final(text)
    if part.text is None:
        return part
    found = list(_NUMBER.finditer(part.text))
    if not found:
        return Extraction(None, "there is no number")
    last = found[-1]
    if len(found) > 1 and _ALTERNATIVE.fullmatch(part.text, found[-2].end(), last.start()):  # guard: number-or-number
        return Extraction(None, f"two numbers to choose from: {quoted(part.text[found[-2].start() : last.end()])}")
    return Extraction(last[0], "the last number")


def final_line(text: str) -> Extraction:
    """The last line that is not empty, without the marks of a list, a heading or bold type.

    Misreads: a closing remark after the answer ("I hope this helps."); an answer of several lines.
    """
    part = _final(text)
    if part.text is None:
        return part
    lines = [line for line in part.text.splitlines() if line.strip()]
    return Extraction(_unmarked(lines[-1]), "the final line") if lines else Extraction(None, "there is no text")


def last_code(text: str, languages: Sequence[str] = ("python", "py", "python3", "")) -> Extraction:
    """The last fenced block of code in one of these languages; "" allows a fence that names no language.

    Unlike the other functions it takes the last of several, because tests decide what the code is worth, and models
    often show a draft first. Misreads: a separate block after the solution that shows how to use it.
    """
    part = _final(text)
    if part.text is None:
        return part
    codes = [code for language, code in _blocks(part.text) if language in languages and code.strip()]
    return (
        Extraction(codes[-1], "the last block of code")
        if codes
        else Extraction(None, "there is no fenced block of code")
    )


# --- shared rules ---

_BOX = re.compile(r"\\boxed\s{0,8}\{")
_THOUGHT = re.compile(r"</(?:think|thinking|reasoning)>")
_THINKING = re.compile(r"<(?:think|thinking|reasoning)>")
_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?%?"
)
_ALTERNATIVE = re.compile(r",?\s{1,9}(?:and/)?or\s{1,9}", re.IGNORECASE)


def _final(text: str) -> Extraction:
    """The text after the policy's thinking."""
    if len(text) > MAX_TEXT_CHARS:
        return Extraction(None, f"the text has {len(text):,} characters, limit {MAX_TEXT_CHARS:,}")
    rest = text[max((closing.end() for closing in _THOUGHT.finditer(text)), default=0) :]
    if _THINKING.search(rest):  # guard: thinking-is-no-answer
        return Extraction(None, "the thinking does not end")
    return Extraction(rest, "the final part")


def _only(contents: Sequence[str], form: str) -> Extraction:
    """The content of a form that must occur with one content only."""
    if not contents:
        return Extraction(None, f"there is no {form}")
    different = {" ".join(content.split()) for content in contents}
    if len(different) > 1:  # guard: one-answer
        return Extraction(None, f"{form} occurs {len(contents)} times, with {len(different)} different contents")
    answer = contents[-1].strip()
    return Extraction(answer, form) if answer else Extraction(None, f"{form} is empty")


def _closing_brace(text: str, at: int) -> int | None:
    """Where the brace that opens just before `at` closes. Braces after a backslash do not count."""
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and code of each closed fenced block."""
    blocks: list[tuple[str, str]] = []
    language, start, at = None, 0, 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        if language is None and line.startswith("```") and "`" not in line[3:]:
            language, start = line[3:].strip().lower(), at
        elif language is not None and line.rstrip() == "```":
            blocks.append((language, text[start : at - len(line)]))
            language = None
    return blocks


def _first_line(piece: str) -> str:
    return next((line for line in map(_unmarked, piece.splitlines()) if line), "")


def _unmarked(line: str) -> str:
    """A line without the Markdown around it: bold, italics, headings, quotes and list marks."""
    return re.sub(r"^(?:[#>*_\s]|-\s)+", "", line.rstrip(_AROUND))


_AROUND = "*_ \t\r\n"

"""Is the answer the right choice? For questions with lettered options.

Called by environments. It accepts the letter in its usual forms ("B", "(B)", "B.", "**B**", "option B", "the answer is
B"), the letter with the text of its option, and the text alone if only one option has it.

Failure modes. It refuses a letter with an explanation ("B because ..."): extract the letter first. An answer that is
the letter of one option and the text of another is ambiguous, and refused. A guess among four options is right one time
in four, so a mean reward of 1/4 shows no knowledge.
"""

import re
from collections.abc import Mapping, Sequence

from shoal.envs.answers.exact import normalised
from shoal.envs.answers.graded import Answer, Graded, quoted, right, taken, wrong
from shoal.errors import ConfigError


def choice(answer: Answer, letter: str, options: Mapping[str, str] | Sequence[str]) -> Graded:
    """1 if the answer names the option of this letter, and no other. Options without letters get A, B, C and so on."""
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

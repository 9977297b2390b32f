"""Code blocks of the docs on the site: what tests read after the language becomes the block's title.

The docs open blocks with a language and a word for tests/test_docs.py: "console run", "python my_env.py". The site's
Markdown takes such a line for text. Named in zensical.toml; it knows nothing of what a block holds.
"""

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

OPENING = re.compile(r"^```(?P<language>\w+) (?P<word>\S+)$")
BEFORE_FENCES = 28
"""Priority: after whitespace is made uniform (30), before blocks are cut out (25)."""


class Titles(Preprocessor):
    """Write openings as the site's Markdown reads them."""

    def run(self, lines: list[str]) -> list[str]:
        return [OPENING.sub(titled, line) for line in lines]


def titled(opening: re.Match[str]) -> str:
    """`run` is left out, and a file's name becomes a title."""
    language, word = opening["language"], opening["word"]
    return f"```{language}" if word == "run" else f'```{language} title="{word}"'


class Fences(Extension):
    """The extension of the Markdown package that zensical.toml names."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Titles(md), "titles", BEFORE_FENCES)


def makeExtension(**options: Any) -> Fences:
    return Fences(**options)

"""A chat template, compiled in a sandbox: messages and arguments in, text out.

Called by the renderer. A stranger wrote the template, so it reaches nothing outside, and an error that it raises
becomes one line. It has no clock. A template that asks for the date gets the argument `date`, or else a fixed day.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shoal.errors import Overreach, StateError

DATE = "2024-07-26"
"""What templates get as today's date, unless the argument `date` gives another. It is the default of Llama's
templates."""

_ERRORS = (
    jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
)  # fmt: skip
"""Exceptions that a stranger's template may raise, because its expressions are Python's."""


class Template:
    """A compiled template, and the texts of the special tokens that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises `StateError` if the template is malformed."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self.source, self._tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StateError(f"the chat template is malformed: {error}. Download the model again") from None

    def text(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        """The conversation as text. With `prompt`, it ends where the policy begins to write.

        Raises `StateError` if the template refuses the messages.
        """
        given = {"strftime_now": _Day(arguments.get("date", DATE)), **arguments, **self._tokens}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **given)
        except (MemoryError, RecursionError) as error:
            raise Overreach(
                f"the chat template needs too much memory or recursion ({type(error).__name__}): use another model"
            ) from None
        except _ERRORS as error:
            raise StateError(
                f"the chat template refuses these messages: {error}. Use a model that takes them"
            ) from None


class _Day:
    """The function that templates call as `strftime_now`."""

    def __init__(self, date: str) -> None:
        self._date = date

    def __call__(self, form: str) -> str:
        try:
            return datetime.datetime.fromisoformat(self._date).strftime(form)
        except (TypeError, ValueError):
            raise jinja2.TemplateError(f"date is {self._date!r:.40}: write it as {DATE}") from None


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, with which templates mark what an assistant wrote. It renders its text unchanged."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text", []), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> str:
        text: str = caller()
        return text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As in `transformers`. That of jinja would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

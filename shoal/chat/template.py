"""A chat template, compiled in a sandbox: messages and arguments in, text out.

A stranger wrote the template, so it reaches nothing outside, and an error that it raises becomes one line. It has no clock.
A template that asks for the date gets the argument `date`, or else a fixed day. It draws nothing at random, and writes no
address of memory: every machine must make the same prompt.
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shoal.errors import Overreach, StateError
from shoal.models.chat_template_files import TemplateSource

DATE = "2024-07-26"
"""What templates get as today's date, unless the argument `date` gives another. It is the default of Llama's
templates."""

_ERRORS = (
    jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
)  # fmt: skip
"""Exceptions that a stranger's template may raise, because its expressions are Python's."""


_UNNAMED = "<template>"
"""What jinja calls the file of a template that it got as a text."""


class Template:
    """A compiled template, and the texts of the special tokens that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: TemplateSource = TemplateSource()) -> None:
        """Raises `StateError` if the template is malformed."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters |= {"tojson": _tojson, "random": _refuse_random}
        environment.globals |= {"raise_exception": _raise_exception, "lipsum": _refuse_random}
        self.source, self._tokens, self._where = source, dict(tokens), where
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            random_nodes = _random_nodes(tree)
        except (RecursionError, SyntaxError, *_ERRORS) as error:
            line = (
                f"line {error.lineno}: {_said(error)}"
                if isinstance(error, jinja2.TemplateSyntaxError)
                else _said(error)
            )
            place = f"{where.text()}, {line}" if where.file else line
            raise StateError(
                f"the chat template is malformed: {place}. Correct the template there, or download the model again"
            ) from None
        if random_nodes:  # guard: no-chance-in-a-template
            place = f"{where.text()}, line {random_nodes[0].lineno}: {random_nodes[0].name}"
            raise StateError(
                f"the chat template cannot be used: {place} {_CHANCE}. Take that out of the template, or use another model"
            )

        self.literals = tuple(dict.fromkeys(_literals(tree)))
        """Those that it names or writes, in their order."""

    def text(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        """The conversation as text. With `prompt`, it ends where the policy begins to write.

        Raises `StateError` if the template refuses the messages, or fails.
        """
        day = _Day(arguments.get("date", DATE))
        given = {"strftime_now": day, "tools": None, "documents": None, **arguments, **self._tokens}
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=prompt, **given)
        except (MemoryError, RecursionError) as error:
            raise Overreach(
                f"the chat template needs too much memory or recursion ({type(error).__name__}): use another model"
            ) from None
        except _Refusal as error:
            raise StateError(
                f"the chat template refuses these messages: {_said(error)}. Let the environment send others, or "
                "use a model that takes them"
            ) from None
        except _ERRORS as error:
            raise StateError(
                f"the chat template fails in {self._place(error)}: {_said(error)}. Correct the template there, or use "
                "another model"
            ) from None
        addresses = set(_ADDRESS.findall(text))
        given_text = f"{messages}{arguments}{self.source}" if addresses else ""
        for address in sorted(addresses):
            if address not in given_text:  # guard: no-address-in-a-prompt
                around = re.split("<|&lt;", text[: text.index(address)])[-1]
                raise StateError(
                    f"the chat template writes where an object is in memory (<{around[-60:]}{address}>), so each machine "
                    f"would make another prompt. Correct it in {self._where.text(whole=False)}, or use another model"
                )
        return text

    def _place(self, error: BaseException) -> str:
        """The file and line of the template in which an error was raised."""
        lines, step = list[int](), error.__traceback__
        while step is not None:  # jinja gives the frames of a template the numbers of its own lines
            if step.tb_frame.f_code.co_filename == _UNNAMED:
                lines.append(step.tb_lineno)
            step = step.tb_next
        file = self._where.text(whole=False)
        return f"{file}, line {lines[-1]}" if lines else file


def _said(error: BaseException) -> str:
    """What an error says, as a sentence without its stop."""
    said = error.message if isinstance(error, jinja2.TemplateSyntaxError) else str(error)
    return (said or type(error).__name__).rstrip(" .")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """In which the keys of two messages have no difference: a set has another order in each process."""

    intercepted_binops = frozenset("-")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        found = super().call_binop(context, operator, left, right)
        if isinstance(found, set):  # guard: no-set-in-a-template
            raise jinja2.TemplateRuntimeError("it makes a set, whose order differs on each machine")
        return found


def _literals(tree: jinja2.nodes.Template) -> Iterator[str]:
    """The texts of a template: constants, those that it joins, and what stands outside its expressions."""
    for node in tree.find_all((jinja2.nodes.Const, jinja2.nodes.TemplateData, jinja2.nodes.Concat, jinja2.nodes.Add)):
        try:
            value = node.as_const()
        except jinja2.nodes.Impossible:
            continue
        if isinstance(value, str):
            yield value


def _random_nodes(tree: jinja2.nodes.Template) -> list[Any]:
    """The nodes of a template that draw at random."""
    names = list(tree.find_all(jinja2.nodes.Name))
    own = {name.name for name in names if name.ctx != "load"}
    return [
        *(one for one in tree.find_all(jinja2.nodes.Filter) if one.name == "random"),
        *(one for one in names if one.name == "lipsum" and one.name not in own),
    ]


def _refuse_random(*_: Any) -> None:
    """Replaces `random` and `lipsum` in the sandbox: a template can reach them without writing their names."""
    raise jinja2.TemplateRuntimeError(f"it {_CHANCE}")


_CHANCE = "draws at random, so each machine would make another prompt"

_ADDRESS = re.compile(" at (0x[0-9a-fA-F]+)(?:>|&gt;)")
"""What Python writes of an object that has no text of its own, such as a function or a filter that was not read; also
escaped."""


class _Refusal(jinja2.TemplateError):
    """What a template raises by itself about the messages or arguments."""


class _Day:
    """The function that templates call as `strftime_now`."""

    def __init__(self, date: str) -> None:
        self._date = date

    def __call__(self, form: str) -> str:
        try:
            return datetime.datetime.fromisoformat(self._date).strftime(form)
        except (TypeError, ValueError):
            raise _Refusal(f"date is {self._date!r:.40}: write it as {DATE}") from None


class _GenerationBlock(jinja2.ext.Extension):
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
    raise _Refusal(message)

"""Chat messages as plain data, and the one strict normaliser that every path uses before a template sees them.

The format is OpenAI's: each message has `role` and `content`, the assistant's also `reasoning_content` and
`tool_calls`, a tool's also `tool_call_id` and `name`. Content is a text, or a list of text parts. A key whose value is
None is absent, as columns of a table give it to rows that lack it, also in calls, where transformers keeps it; an empty
text stays.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shoal.errors import ShoalError

Message: TypeAlias = Mapping[str, Any]
"""One chat message."""

ROLES = ("system", "user", "assistant", "tool")

MAX_CALLS = 128
"""Limit on the tool calls of one message."""

MAX_PARTS = 128
"""Limit on the parts of one content."""

MAX_DEPTH = 64
"""Limit on the nesting of lists and tables in the arguments of a call or of a template."""

_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id", "name"},
}

_MEDIA = ("image", "audio", "video", "file", "document")
"""Words in the types of parts that a text policy cannot read: `image_url` and `input_image` are images."""

REASONING_SEPARATOR = "\n\n"
"""White space after the reasoning of a turn, where the policy's own is not known."""

RESERVED = ("messages", "add_generation_prompt", "strftime_now")
"""Names that we give to a template, and that no setting may replace."""


class BadMessage(ShoalError):
    """A message that we show to no template. Its text, one line, names the fault and the remedy."""


class Written(NamedTuple):
    """Refers to a turn of the policy in a history, so that its tokens are used again instead of its text."""

    turn: int
    """Counted from 0."""
    reasoning: bool = False
    """Whether the turn contains reasoning, which a template may leave out of later prompts."""
    calls: tuple[tuple[str, str], ...] = ()
    """Id and function name of each tool call in the turn."""
    empty: bool = False
    """Whether the reasoning has no words. A template may show none then."""
    separator: str = REASONING_SEPARATOR
    """White space between the reasoning and the text, as the policy wrote it."""
    end: int = -1
    """The token that ends the turn; -1 if that is not known."""
    opens_reasoning: bool | None = None
    """Whether the turn's own text opens its reasoning, which its prompt may have done; None if that is not known."""


def normal(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in one form: content is a text or a list of text parts, which only turns that call or think may lack,
    and arguments are an object or its JSON text. Nothing is added: see `with_defaults`.

    Raises `BadMessage` if a message cannot be brought into this form.
    """
    return [_normal(message) for message in messages]


def text_of(message: Message) -> str:
    """The content of a normal message, its parts joined; empty if it has none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def with_defaults(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Normal messages with what some templates do not do without: each call has an id, a type and arguments, each result
    the id and the name of its call, and no list of calls is empty. Results without an id answer the calls in order."""
    whole = [dict(message) for message in messages]
    given = {call.get("id") for message in whole for call in message.get("tool_calls", ())}
    free = (number for i in itertools.count() if (number := f"call{i:05d}") not in given)
    named: dict[str, str] = {}
    waiting: list[str] = []
    for message in whole:
        if message["role"] == "assistant":
            waiting = []
        calls = []
        for call in message.pop("tool_calls", ()):
            function = call["function"]
            number, arguments = call.get("id") or next(free), function.get("arguments") or {}
            calls.append(call | {"id": number, "type": "function", "function": function | {"arguments": arguments}})
            named[number] = function["name"]
            waiting.append(number)
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool":
            if "tool_call_id" not in message and waiting:
                message["tool_call_id"] = waiting[0]
            if message.get("tool_call_id") in waiting:
                waiting.remove(message["tool_call_id"])
            if "name" not in message and message.get("tool_call_id") in named:
                message["name"] = named[message["tool_call_id"]]
    return whole


def as_messages(reply: object) -> list[Message]:
    """An environment's reply as messages. A text becomes a message of the user. Raises `BadMessage` for other types."""
    if isinstance(reply, str):
        return [{"role": "user", "content": reply}]
    if isinstance(reply, Mapping):
        return [reply]
    if isinstance(reply, Sequence) and reply and all(isinstance(message, Mapping) for message in reply):
        return list(reply)
    raise BadMessage(
        f"a reply is a text, a message or a list of messages, not {type(reply).__name__}: give one of them"
    )


def plain(value: Any, what: str, depth: int = MAX_DEPTH) -> Any:
    """A copy of plain data: texts, numbers, booleans, None, lists and tables. Raises `BadMessage` for anything else."""
    if depth < 0:
        raise BadMessage(f"{what} is nested deeper than {MAX_DEPTH} levels: flatten it")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadMessage(f"{what} has a key that is not text: use texts as keys")
        return {key: plain(inner, what, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, what, depth - 1) for inner in value]
    raise BadMessage(f"{what} contains a {type(value).__name__}: use texts, finite numbers, booleans, lists and tables")


def arguments_of(env: Any) -> dict[str, Any]:
    """The arguments that an environment gives to the chat template: its `template`, and its `tools` if it has any."""
    tools = getattr(env, "tools", ())
    return {**({"tools": list(tools)} if tools else {}), **getattr(env, "template", {})}


def template_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as a template gets them. Raises `BadMessage` if one has a reserved name or is not plain data."""
    for name in arguments:
        if name in RESERVED or name.endswith("_token"):  # guard: template-arguments-of-ours
            raise BadMessage(f"template argument {name}: the renderer sets it itself. Leave it out")
    return {name: plain(value, f"template argument {name}") for name, value in arguments.items()}


def _normal(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise BadMessage(
            f"a message has a role and a content, as in {{'role': 'user', 'content': 'hello'}}: found {kind}"
        )
    message = _without_none(message)
    role = message.get("role")
    if role not in _KEYS:
        raise BadMessage(f"a message has role {role!r:.40}: use {', '.join(ROLES)}")
    if unknown := sorted(str(key) for key in message if key not in _KEYS[role]):
        raise BadMessage(
            f"a message of role {role} has the key {unknown[0]:.40}: known are {', '.join(sorted(_KEYS[role]))}"
        )
    calls = [_call(call) for call in _listed(message.get("tool_calls"), "tool_calls")]
    if len(calls) > MAX_CALLS:
        raise BadMessage(f"a message has {len(calls)} tool calls, limit {MAX_CALLS}: split it")
    reasoning = _optional(message, "reasoning_content")
    content = message.get("content")
    if content is None and not (calls or reasoning):
        raise BadMessage(f"a message of role {role} has no content: give a text, which may be empty")
    clean = {"role": role} if content is None else {"role": role, "content": _content(content, role)}
    if "reasoning_content" in message:  # an empty one may hide a thought in the content
        clean["reasoning_content"] = reasoning
    if "tool_calls" in message:
        clean["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if value := _optional(message, key):
            clean[key] = value
    return clean


def _content(content: object, role: str) -> str | list[dict[str, str]]:
    """A content as a text or as text parts. Raises `BadMessage` if a part of it is not text."""
    if isinstance(content, str):
        return content
    parts, listed = [], _listed(content, f"the content of a message of role {role}")
    if len(listed) > MAX_PARTS:
        raise BadMessage(f"a message of role {role} has {len(listed)} parts, limit {MAX_PARTS}: join them")
    for part in map(_without_none, listed):
        kind = part if isinstance(part, str) else part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
            continue
        media = next((name for name in _MEDIA if isinstance(part, Mapping) and name in str(kind)), None)
        if media:  # guard: text-only
            raise BadMessage(
                f"a message of role {role} has a part of type {kind!s:.40}: policies here read text only, no {media}. "
                "Describe it in a text part, or leave the task out"
            )
        raise BadMessage(f'a part of a message of role {role} is {part!r:.60}: write {{"type": "text", "text": ...}}')
    return parts or ""


def _call(call: object) -> dict[str, Any]:
    call = _without_none(call)
    function = _without_none(call.get("function")) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not (isinstance(call, Mapping) and isinstance(function, Mapping) and isinstance(name, str) and name):
        raise BadMessage(
            f'a tool call is {call!r:.80}: write {{"id": ..., "function": {{"name": ..., "arguments": {{...}}}}}}'
        )
    given = function.get("arguments", "")
    try:
        read = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the arguments of a call of {name:.40} are not JSON ({error}): give an object") from None
    if not isinstance(read, Mapping):
        raise BadMessage(f"the arguments of a call of {name:.40} are {type(read).__name__}: give an object")
    arguments = plain(read, f"the arguments of a call of {name:.40}")  # None stays: it may be an argument's value
    # A template may get text as an object. What is escaped in it would escape a look for what it holds.
    as_text = isinstance(given, str) and "\\u" not in given  # guard: arguments-hide-no-text
    shown = {"name": name, "arguments": given if as_text else arguments}
    told = {key: _optional(call, key) for key in ("id", "type")} | {
        "function": {key: shown[key] if key in shown else _plain(function[key], key) for key in function}
    }
    return {key: told[key] if key in told else _plain(call[key], key) for key in call if told.get(key) != ""}


def _plain(value: Any, key: str) -> Any:
    return plain(value, f"{key:.40} of a tool call")


def _optional(message: Message, key: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise BadMessage(f"{key} of a message is {type(value).__name__}: give a text")
    return value or ""


def _without_none(value: Any) -> Any:
    """A table without the keys whose value is None; any other value as it is."""
    if type(value) is not dict and not isinstance(value, Mapping):
        return value
    return {key: inner for key, inner in value.items() if inner is not None}


def _listed(value: object, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise BadMessage(f"{what} is {type(value).__name__}: give a text or a list")
    return list(value)

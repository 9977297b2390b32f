"""One turn of the policy: what it thought, what it said, and which tools it called, in its notation.

The run file names the notation, or the chat template shows it. A turn may be any text: malformed calls are reported as
data and raise nothing. Pure and deterministic.
"""

import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.chat.messages import MAX_CALLS, REASONING_SEPARATOR
from shoal.chat.tool_call_formats import reasoning_marks
from shoal.chat.tool_call_literals import (
    MAX_NAME,
    ArgumentReader,
    MalformedArguments,
    read_json,
    read_object,
    tagged,
    typed,
)
from shoal.env import Action, Parsed, ToolCall

MAX_CHARS = 1 << 20
"""Longer texts are not searched for calls."""

Tools: TypeAlias = Sequence[Mapping[str, Any]]


BEGINS_CALL = ("<tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|tool_call>", "<|tool_call_start|>")
"""A turn that begins with one of these skips the reasoning that its prompt began."""


Calls: TypeAlias = Iterator[ToolCall | str | MalformedArguments]
"""What a parser finds, in order: calls, visible text, and faults."""


def parse(text: str, notation: str = "", thinking: bool = False, tools: Tools = ()) -> Parsed:
    """Take a turn apart. `thinking` says that the prompt had already begun the reasoning."""
    if notation in CHANNELS:
        return _parse_channels(text, notation, tools)
    reasoning, begins, cut = _reasoning(text, notation, thinking)
    rest = text[begins:]
    find = PARSERS.get(notation)
    if find is None or cut:
        return Parsed(reasoning, rest.strip(), (), (), begins)
    if len(rest) > MAX_CHARS:
        return Parsed(
            reasoning, rest, (), (f"{len(rest)} characters, limit {MAX_CHARS}: no calls were looked for",), begins
        )
    visible, calls, problems = _collect(find(rest, tools))
    return Parsed(reasoning, visible.strip(), calls, problems, begins)


def _reasoning(text: str, notation: str, thinking: bool) -> tuple[str, int, bool]:
    """Reasoning, where the rest begins, and whether the reasoning was cut short."""
    opening, closing = reasoning_marks(notation)
    start = len(text) - len(text.lstrip())
    opened = text.startswith(opening, start)
    end = text.find(closing)
    if end < 0:
        if not (thinking or opened) or text.startswith(BEGINS_CALL, start):
            return "", 0, False
        return text[start + len(opening) * opened :].strip(), len(text), True
    if not (thinking or opened) and opening in text[:end]:
        return "", 0, False  # visible text that speaks of the marks
    begins = end + len(closing)
    begins += len(text[begins:]) - len(text[begins:].lstrip("\n"))
    return text[start + len(opening) * opened : end].strip(), begins, False


def _collect(found: Calls) -> tuple[str, tuple[ToolCall, ...], tuple[str, ...]]:
    visible, calls, problems = [], [], []
    for part in found:
        if isinstance(part, ToolCall):
            calls.append(part)
        elif isinstance(part, str):
            visible.append(part)
        else:
            problems.append(" ".join(str(part).split())[:200])
        if len(calls) + len(problems) >= MAX_CALLS:  # guard: calls-are-few
            problems.append(f"only the first {MAX_CALLS} calls were read")
            break
    return "".join(visible), tuple(calls), tuple(problems)


def _blocks(text: str, opening: str, closing: str, read: Callable[[str], ToolCall], open_end: bool = False) -> Calls:
    """Calls between two marks. With `open_end` the last one needs no closing mark, which may be the turn's end token."""
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        yield text[at:begin]
        begin += len(opening)
        end = text.find(closing, begin)
        if end < 0 and not open_end:
            yield MalformedArguments(f"{opening} is not closed")
            return
        at = len(text) if end < 0 else end + len(closing)
        yield _attempt(read, text[begin : end if end >= 0 else len(text)])
    yield text[at:]


def _attempt(read: Callable[[str], ToolCall], text: str) -> ToolCall | MalformedArguments:
    try:
        return read(text)
    except MalformedArguments as fault:
        return fault


def _name(text: str) -> str:
    if not 0 < len(text) <= MAX_NAME or any(map(str.isspace, text)):
        raise MalformedArguments("a call has no name")
    return text


_ID = re.compile(r"[\w.:\-]{1,64}", re.ASCII)


def _named(value: Any) -> ToolCall:
    """A call as an object with a name and arguments."""
    name = value.get("name") if isinstance(value, dict) else None
    name = _name(name if isinstance(name, str) else "")
    given: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    arguments = read_object(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise MalformedArguments(f"arguments of {name[:40]} are {type(arguments).__name__}, not an object")
    number = value.get("id")
    is_id = isinstance(number, str) and _ID.fullmatch(number)  # guard: ids-of-calls-are-words
    return ToolCall(name, arguments, number if is_id else "")


# --- notations with calls between marks ---


def _hermes(text: str, tools: Tools) -> Calls:
    return _blocks(text, "<tool_call>", "</tool_call>", lambda inner: _named(read_json(inner)))


def _qwen_xml(text: str, tools: Tools) -> Calls:
    def read(inner: str) -> ToolCall:
        _, found, rest = inner.partition("<function=")
        name, closed, body = rest.partition(">")
        if not (found and closed):
            raise MalformedArguments("<function=...> is missing")
        given = tagged(body, "<parameter=", ">", "</parameter>")
        texts = {key: value.removeprefix("\n").removesuffix("\n") for key, value in given.items()}
        return ToolCall(_name(name), typed(name, texts, tools))

    return _blocks(text, "<tool_call>", "</tool_call>", read)


def _glm(text: str, tools: Tools) -> Calls:
    def read(inner: str) -> ToolCall:
        name, mark, rest = inner.partition("<arg_key>")
        pieces = tagged(mark + rest, "<arg_key>", "</arg_key>", "</arg_value>")
        texts = {key: value.partition("<arg_value>")[2] for key, value in pieces.items()}
        return ToolCall(_name(name.strip()), typed(name.strip(), texts, tools))

    return _blocks(text, "<tool_call>", "</tool_call>", read)


def _deepseek(text: str, tools: Tools) -> Calls:
    def read(inner: str) -> ToolCall:
        kind, _, said = inner.partition("<｜tool▁sep｜>")
        name, fence, given = said.partition("\n```json\n")
        if not fence:
            name, given = kind, said
        return ToolCall(_name(name.strip()), read_object(given.removesuffix("\n```")))

    for part in _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read, open_end=True):
        yield re.sub("<｜tool▁calls▁(?:begin|end)｜>", "", part) if isinstance(part, str) else part


def _gemma(text: str, tools: Tools) -> Calls:
    def read(inner: str) -> ToolCall:
        reader = ArgumentReader(inner, ":", '<|"|>')
        reader.need("call:")
        name = reader.name()
        reader.need("{")
        return ToolCall(name, reader.pairs("}"))

    return _blocks(text, "<|tool_call>", "<tool_call|>", read)


def _lfm(text: str, tools: Tools) -> Calls:
    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    before, found, rest = text.partition(opening)
    yield before
    if not found:
        return
    inner, closed, after = rest.partition(closing)
    reader = ArgumentReader(inner, "=", "'")
    try:
        if not closed:
            raise MalformedArguments(f"{opening} is not closed")
        reader.need("[")
        while not reader.take("]"):
            name = reader.name()
            reader.need("(")
            yield ToolCall(name, reader.pairs(")"))
            if not reader.take(","):
                reader.need("]")
                break
    except MalformedArguments as fault:
        yield fault
    yield after


# --- notations with calls at the end, or as the whole turn ---


def _mistral(text: str, tools: Tools) -> Calls:
    before, *pieces = text.split("[TOOL_CALLS]")
    yield before
    for piece in pieces:
        name, marked, given = piece.partition("[ARGS]")
        if marked:
            name, _, number = (part.strip() for part in name.partition("[CALL_ID]"))
            called = {"name": name, "id": number}
            yield _attempt(lambda given, called=called: _named({**called, "arguments": given}), given)  # type: ignore[misc]
            continue
        try:
            listed = read_json(piece)
        except MalformedArguments as fault:
            yield fault
            continue
        for value in listed if isinstance(listed, list) else [listed]:
            yield _attempt(lambda inner, value=value: _named(value), piece)  # type: ignore[misc]


def _llama(text: str, tools: Tools) -> Calls:
    tag = "<|python_tag|>"
    said = text.strip()
    called = said.startswith(tag)
    said = said.removeprefix(tag).strip()
    if not (called or re.match(r'\{\s*"(?:type|name)"', said)):
        yield text
        return
    try:
        yield _named(read_json(said))
    except MalformedArguments as fault:
        if called and not said.startswith("{"):
            yield ToolCall("code_interpreter", {"code": said})
        else:
            yield fault


PARSERS: dict[str, Callable[[str, Tools], Calls]] = {
    "hermes": _hermes, "qwen-xml": _qwen_xml, "glm": _glm, "deepseek": _deepseek, "gemma": _gemma, "lfm": _lfm,
    "mistral": _mistral, "llama": _llama,
}  # fmt: skip
"""The parser of each notation."""

CHANNELS = ("harmony", "atem")
"""Notations that write each part of a turn into a separate channel."""

NOTATIONS = (*PARSERS, *CHANNELS)


# --- notations with channels ---

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]{1,256})", re.ASCII)


def _parse_channels(text: str, notation: str, tools: Tools) -> Parsed:
    """Messages, each with a header that names its channel or its recipient. The prompt has begun the first one."""
    reasoning, begins = [], -1
    found: list[ToolCall | str | MalformedArguments] = []
    at = 0
    for piece in text[:MAX_CHARS].split("<|start|>")[:MAX_CALLS]:
        header, marked, body = piece.partition("<|message|>")
        body = re.split(r"<\|(?:end|eom)\|>", body, maxsplit=1)[0]
        recipient = _RECIPIENT.search(header)
        target = recipient[1] if recipient else ""
        thought = "<|channel|>analysis" in header and not target if notation == "harmony" else target == "self"
        if thought:
            reasoning.append(body)
        elif marked:
            called = target and target not in ("user", "assistant")
            if begins < 0:  # a call begins with its recipient, which is in the header
                role = "assistant" if at else ""
                begins = at + len(role) if called else at + len(header) + len(marked)
            if not called:
                found.append(body)
            elif notation == "harmony":
                found.append(_attempt(lambda given, target=target: ToolCall(target, read_object(given)), body))  # type: ignore[misc]
            else:
                found.extend(_invoked(body, tools))
        elif header.strip():
            found.append(
                header if notation == "harmony" and not at else MalformedArguments("a message has no <|message|>")
            )
        at += len(piece) + len("<|start|>")
    visible, calls, problems = _collect(iter(found))
    return Parsed(
        "\n".join(reasoning).strip(),
        visible.strip(),
        calls,
        problems,
        len(text) if begins < 0 and reasoning else max(0, begins),
    )


def _invoked(body: str, tools: Tools) -> Iterator[ToolCall | MalformedArguments]:
    pieces = body.split('<atem:invoke name="')[1:]
    for piece in pieces:
        name, _, inner = piece.partition('">')
        given = tagged(inner, '<atem:parameter name="', '">', "</atem:parameter>")
        yield _attempt(lambda name, given=given: ToolCall(_name(name), typed(name, given, tools)), name)  # type: ignore[misc]
    if not pieces:
        yield MalformedArguments("<atem:invoke ...> is missing")


# --- where the reasoning of a turn ends ---


def reasoning_length(token_ids: Sequence[int], action: Action, decode: Callable[[Sequence[int]], str]) -> int:
    """How many of a turn's tokens are its reasoning. A token on the border counts as reasoning.

    This splits a turn's tokens over the places of `Renderer.history`, so that the policy's text is never tokenised again.
    """
    begins = len(_reasoning_of(action))
    return bisect.bisect_left(range(len(token_ids)), begins, key=lambda count: len(decode(token_ids[:count])))


def reasoning_separator(action: Action) -> str:
    """White space between a turn's reasoning and what follows it."""
    if action._notation in CHANNELS:
        return REASONING_SEPARATOR
    text = _reasoning_of(action)
    return text[len(text.rstrip("\n")) :]


def has_reasoning(action: Action) -> bool:
    """Whether a turn's reasoning has words."""
    if action._notation in CHANNELS:
        return bool(action.reasoning)
    opening, closing = reasoning_marks(action._notation)
    return bool(_reasoning_of(action).replace(opening, "").replace(closing, "").strip())


def opens_reasoning(action: Action) -> bool:
    """Whether a turn begins with the mark that opens reasoning."""
    return action.lstrip().startswith(reasoning_marks(action._notation)[0])


def _reasoning_of(action: Action) -> str:
    """The text of a turn up to where its reasoning ends, with the new lines after it: as chat templates take it, that is
    the last mark which closes one, unless the turn calls tools, whose arguments may have such a mark."""
    if action._notation in CHANNELS or action.tool_calls:
        return str(action)[: action.parsed.begins]
    before, closing, rest = action.rpartition(reasoning_marks(action._notation)[1])
    return before + closing + rest[: len(rest) - len(rest.lstrip("\n"))] if closing else ""

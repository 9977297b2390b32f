"""What a chat template takes and shows, measured by rendering marked messages.

Templates differ: some take content as a list of parts, some refuse a system message, some want the arguments of a tool
call as JSON text, some read reasoning under another name or leave it out. `present` writes messages in the form that
one template takes. A template's name plays no part.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from shoal.chat.messages import REASONING_SEPARATOR, ROLES, text_of, with_defaults
from shoal.chat.template import Template
from shoal.chat.tool_call_formats import reasoning_marks
from shoal.errors import Overreach, StateError
from shoal.protocol.encoding import digest

MARK = "\N{OBJECT REPLACEMENT CHARACTER}written\N{OBJECT REPLACEMENT CHARACTER}"
"""Replaces the policy's words in a rendered turn. What the template puts after it is the text that follows the turn."""

MAX_CUTS, MAX_CUT_CHARS = 256, 256
"""Texts of a template that are tried as marks by which it cuts turns, and characters of each: others are not found."""

_REASON, _RESULT = "reasonmark", "resultmark"

_WORDS = ("wordmark", "another and longer wordmark")
_AS_DATA = re.compile(rf"""['"]text\\*['"]: ?\\*['"]{MARK}""")
"""A part of a content, printed and not read."""
_ENCLOSED = re.compile(r'\\"value|["{]\{"value')
"""JSON text of arguments within something else."""
_AS_WRITTEN = ('A <b>Word</b> & "more"', "it's 2 × {Twice}\\n,\nas it is")
"""Turns whose signs templates may change."""

ASK = {"role": "user", "content": "."}
"""Stands for a conversation of which no more is known."""

RESULT = {"role": "tool", "content": ".", "tool_call_id": "call00000", "name": "tool"}
"""Stands for what the first call of `calling` gives."""


def unique_mark(key: str) -> str:
    """A mark that is in no text of this key. No text holds its own digest, nor do parts of one that a template joins."""
    return MARK if MARK[0] not in key else f"{MARK}{digest(key.encode())}"  # guard: mark-not-forged


class CallStyle(NamedTuple):
    """A form of a message with tool calls."""

    as_json: bool
    """Arguments are JSON text, not an object."""
    no_content: bool
    """There is no content; transformers drops one that is None."""


class TemplateCapabilities:
    """What one template takes and shows."""

    def __init__(self, template: Template, notation: str) -> None:
        self.template, self.notation = template, notation
        self._marks = reasoning_marks(notation)
        self._cut_marks: dict[str, str] = {}

    def text(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        """Normal messages as the template shows them, completed if it refuses them as they are: so a template that takes
        some messages without an id may show it with others. Raises `StateError` if it refuses both."""
        try:
            return self.template.text(self.present(messages), arguments, prompt)
        except Overreach:
            raise
        except StateError:
            whole = with_defaults(messages)
            if whole == list(messages):
                raise
            return self.template.text(self.present(whole), arguments, prompt)

    def shown(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], prompt: bool = True
    ) -> str | None:
        """As `text`; None if the template refuses the messages."""
        try:
            return self.text(messages, arguments, prompt)
        except Overreach:
            raise
        except StateError:
            return None

    @cached_property
    def parts(self) -> bool:
        """Whether content must be a list of parts."""
        plain, listed = ([{"role": "user", "content": c}] for c in (MARK, [{"type": "text", "text": MARK}]))
        return not self._shows(plain, MARK) and self._shows(listed, MARK) and not self._shows(listed, "'type'")

    @cached_property
    def system(self) -> bool:
        """Whether a system message is shown. True also if the template refuses even a message of the user."""
        told = {self._text(self._parted([{"role": "system", "content": words}, ASK])) for words in _WORDS}
        return len(told) > 1 or self._text(self._parted([ASK])) is None

    @cached_property
    def calls(self) -> list[CallStyle]:
        """The forms in which tool calls and their results are shown."""
        result = {**RESULT, "content": _RESULT}
        styles = (CallStyle(False, False), CallStyle(True, False), CallStyle(False, True), CallStyle(True, True))
        turns = [(style, self._parted([ASK, _styled(calling("", 1), [style]), result])) for style in styles]
        shown = [style for style, messages in turns if self._shows(messages, MARK, _RESULT)]
        objects = [style for style in shown if not style.as_json]
        texts = [self._text(messages) or "" for style, messages in turns if style in shown and style.as_json]
        # some put the text in quotes, or in more braces: no call that anybody reads
        return objects if objects and any(_ENCLOSED.search(text) for text in texts) else shown

    @cached_property
    def results(self) -> bool:
        """Whether the result of a tool is shown after a turn of text only."""
        return self._shows(self._parted([ASK, said(MARK), {"role": "tool", "content": _RESULT}]), _RESULT)

    @cached_property
    def reasoning(self) -> bool:
        """Whether the reasoning of the last turn is shown if it is passed as a separate field."""
        turns = [said(MARK, _REASON)]
        if self.calls:  # some templates show it beside tool calls only
            turns.append({**calling("", 1), "reasoning_content": _REASON})
        return any(self._shows(self.present([ASK, turn]), _REASON, prompt=False) for turn in turns)

    def keeps_thinking(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the reasoning of a turn is still shown after the user has answered."""
        turn = self.with_reasoning(said(MARK, _REASON))
        return self._shows(self.present([ASK, turn, ASK]), _REASON, MARK, arguments=arguments)

    @cached_property
    def changes(self) -> bool:
        """Whether the template writes a turn, but not in its own words."""
        told = [self._text(self.present([ASK, said(words)]), prompt=False) or "" for words in _AS_WRITTEN]
        return told[0] != told[1] and not all(words in text for words, text in zip(_AS_WRITTEN, told, strict=True))

    def cut_marks(self, arguments: Mapping[str, Any]) -> str:
        """Texts that make the template change an earlier turn which has them, but for the marks of thoughts that are known;
        empty if there are none. Those that the template names are tried: each at the ends of a turn, and all within one."""
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._cut_marks:
            self._cut_marks[key] = self._find_cut_marks(arguments)
        return self._cut_marks[key]

    def _find_cut_marks(self, arguments: Mapping[str, Any]) -> str:
        def is_cut(text: str) -> bool | None:
            shown = self._text(self.present([ASK, said(text), ASK]), True, arguments)
            return None if shown is None else text not in shown

        word, end = _WORDS[0], (self._text(self.present([ASK, said(MARK)]), False) or "").rpartition(MARK)[2]
        texts = [text for text in self.template.literals if text.strip() and len(text) <= MAX_CUT_CHARS]
        known = [*self._marks, end]
        texts = [text for text in texts if not any(text.strip() in one or one in text for one in known if one)][
            :MAX_CUTS
        ]
        for text in map(str.strip, texts):
            if is_cut(text + word) or is_cut(word + text):
                return text
        for left in (texts, texts[::-1]):
            if is_cut(word + word.join(left) + word) is False:
                continue
            for text in left:  # leave out what is not needed for a cut
                fewer = [other for other in left if other is not text]
                left = fewer if is_cut(word + word.join(fewer) + word) else left
            if is_cut(word + word.join(left) + word):
                return " ... ".join(left)
        return ""

    def varies(self, arguments: Mapping[str, Any]) -> bool:
        """Whether what is written around a turn differs between turns of different words."""
        told = [self._text(self.present([ASK, said(words), ASK]), True, arguments) or "" for words in _WORDS]
        shown = all(words in text for words, text in zip(_WORDS, told, strict=True))
        around = [text.replace(words, MARK) for words, text in zip(_WORDS, told, strict=True)]
        return shown and around[0] != around[1]

    def empty_thought(self, text: str) -> str:
        """The end of a thought without words at the beginning of a text, or a whole one, with the white space around it."""
        opening, closing = map(re.escape, self._marks)
        found = re.match(rf"\s*({opening}\s*)?{closing}\s*", text)
        return found.group() if found else ""

    def reasoning_start(self, text: str) -> int:
        """Where the mark begins with which a text ends, but for white space, if it opens a thought; else -1."""
        opening, bare = self._marks[0], text.rstrip()
        return len(bare) - len(opening) if bare.endswith(opening) else -1

    def ends_thought(self, text: str) -> bool:
        """Whether a text ends with the end of a thought, and white space."""
        return text.rstrip().endswith(self._marks[1])

    def missing_generation_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        """What is written before a turn of the assistant, if prompts end without it: the template ignores
        `add_generation_prompt`. Else empty."""
        shown = self.present(messages)
        told = self.present([*messages, said(MARK)])
        prompt, bare, full = (
            self._text(one, asked, arguments) or "" for one, asked in ((shown, True), (shown, False), (told, False))
        )
        begun, found, _ = full.partition(MARK)
        return begun.removeprefix(prompt).strip() if found and prompt == bare and begun.startswith(prompt) else ""

    def with_reasoning(self, turn: Mapping[str, Any], separator: str = REASONING_SEPARATOR) -> dict[str, Any]:
        """A turn of the policy, with its reasoning as the policy writes it: in the text, unless the template shows it as a
        separate field."""
        reasoning = turn.get("reasoning_content")
        if not reasoning or self.reasoning:
            return dict(turn)
        opening, closing = self._marks
        text = {"content": f"{opening}\n{reasoning}\n{closing}{separator}{text_of(turn)}"}
        return _without(turn, "reasoning_content") | text

    def present(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Normal messages in the form that this template takes."""
        told = [dict(message) for message in messages]
        if any(message["role"] == "system" for message in told) and not self.system:
            told = _folded(told)
        for i, message in enumerate(told):
            if (reasoning := message.get("reasoning_content")) is not None:
                told[i] = {**message, "thinking": reasoning} | ({"reasoning": reasoning} if reasoning else {})
            if message.get("tool_calls"):
                if not self.calls:
                    raise StateError("the chat template shows no tool calls: use a model that was trained with tools")
                told[i] = _styled(told[i], self.calls)
            elif "content" not in message:
                told[i]["content"] = ""
        return self._parted(told)

    def _parted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """With content as lists of parts where the template wants them, and joined where it reads none. `parts` itself does
        not call this."""
        told = [dict(message) for message in messages]
        for message in told:
            if isinstance(message.get("content"), list) and message["role"] not in self._roles_with_parts:
                message["content"] = text_of(message)
            if self.parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        return told

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose content the template takes as a list of parts."""
        asked, called = self._parted([ASK]), calling("", 1, mark=".")
        called = _styled(called, self.calls) if self.calls else said(".")
        before = {"assistant": asked, "tool": [*asked, *self._parted([called])]}
        found = set()
        for role in ROLES:
            message = {**(RESULT if role == "tool" else {"role": role}), "content": [{"type": "text", "text": MARK}]}
            told = [*before.get(role, ()), message, *(asked if role == "system" else ())]
            text = self._text(told, role != "assistant") or ""
            if MARK in text and not _AS_DATA.search(text):
                found.add(role)
        return frozenset(found)

    def _text(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool = True, arguments: Mapping[str, Any] | None = None
    ) -> str | None:
        try:
            return self.template.text(messages, arguments or {}, prompt)
        except Overreach:
            raise
        except StateError:
            return None

    def _shows(
        self,
        messages: Sequence[Mapping[str, Any]],
        *marks: str,
        prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> bool:
        text = self._text(messages, prompt, arguments)
        return text is not None and all(mark in text for mark in marks)


def said(content: str, reasoning: str = "") -> dict[str, Any]:
    """A turn of the assistant."""
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def calling(content: str, count: int, names: Sequence[tuple[str, str]] = (), mark: str = MARK) -> dict[str, Any]:
    """A turn of the assistant with tool calls. The arguments of each contain the mark. `names` are ids and functions."""
    named = names or [(f"call{i:05d}", "tool") for i in range(count)]
    calls = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": {"value": mark}}} for key, name in named
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _styled(message: Mapping[str, Any], styles: Sequence[CallStyle]) -> dict[str, Any]:
    """A message with tool calls as it is, but for what these forms lack."""
    calls, as_json = [], {style.as_json for style in styles}
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if arguments is not None and isinstance(arguments, str) not in as_json:
            function["arguments"] = (
                json.loads(arguments or "{}")
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
        calls.append({**call, "function": function})
    told = {**message, "tool_calls": calls}
    lacks = {style.no_content for style in styles}
    if not told.get("content") and ("content" not in told) not in lacks:
        told = {**told, "content": ""} if "content" not in told else _without(told, "content")
    return told


def _without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


def _folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put system texts before the text of the next user message, for templates without a system role."""
    told: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(text_of(message))
        elif message["role"] == "user" and waiting:
            told.append({**message, "content": "\n\n".join([*waiting, text_of(message)])})
            waiting = []
        else:
            told.append(message)
    return told + ([{"role": "user", "content": "\n\n".join(waiting)}] if waiting else [])

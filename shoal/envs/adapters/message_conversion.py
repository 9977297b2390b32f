"""Converts a turn of the policy into what a foreign package reads, and a package's messages into shoal's."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.env import Action
from shoal.errors import ShoalError


class ModelTurn(NamedTuple):
    """A turn as an OpenAI-style server would return it."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    """Id, function name, and arguments as JSON."""


def said(action: str, first_call: int, inline: bool = False) -> ModelTurn:
    """A turn in parts. Ids of calls are numbered from `first_call`.

    `inline` leaves the reasoning in the content, for parsers that look for it there.
    """
    if not isinstance(action, Action):
        return ModelTurn(action, "", ())
    calls = tuple(
        (f"call{first_call + i:05d}", call.name, json.dumps(call.arguments)) for i, call in enumerate(action.tool_calls)
    )
    content = action.visible if calls or not action.problems else str(action)[action.parsed.begins :].strip()
    if inline and action.reasoning:
        return ModelTurn(f"<think>\n{action.reasoning}\n</think>\n\n{content}", "", calls)
    return ModelTurn(content, action.reasoning, calls)


def spoken(action: str) -> str:
    """A turn without its reasoning."""
    return said(action, 0).content


class History:
    """The conversation that a foreign program has shown so far. It may only grow."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: list[dict[str, Any]] = []
        self.calls = 0
        """Tool calls so far."""

    def new(self, request: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a request that the policy has not read or written yet. Raises `ShoalError` if earlier ones
        have changed."""
        messages = [_plain(message) for message in request]
        known = len(self._known)
        for number, (before, now) in enumerate(zip(self._known, messages, strict=False)):
            if before != now:
                raise self._rewritten(number, before, now)
        if len(messages) <= known:
            raise self._rewritten(len(messages), self._known[-1], "nothing after it")
        self._known = messages
        return [_named(message, messages) for message in messages[known:]]

    def wrote(self, turn: ModelTurn) -> None:
        """Remember a turn of the policy."""
        self.calls += len(turn.calls)
        self._known.append(_assistant(turn.content, turn.reasoning, turn.calls))

    def _rewritten(self, number: int, before: object, now: object) -> ShoalError:
        return ShoalError(
            f"environment {self._name} rewrites the conversation: message {number} was {before!r:.80}, then {now!r:.80}. "
            "Only conversations that grow at the end are supported"
        )


def openai_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function in OpenAI's form."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _assistant(content: str, reasoning: str, calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, name, arguments in calls
        ]
    return message


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the keys that shoal knows. Calls may be in OpenAI's form, or flat as in verifiers."""
    role, content = message["role"], message.get("content")
    if role == "assistant":
        calls = [
            (call["id"], inner["name"], inner["arguments"])
            for call in message.get("tool_calls") or ()
            for inner in (call.get("function") or call,)
        ]
        return _assistant(content or "", message.get("reasoning_content") or "", calls)
    if isinstance(content, list):
        content = [dict(part) for part in content]
    plain = {"role": role, "content": "" if content is None else content}
    if role == "tool":
        plain["tool_call_id"] = message["tool_call_id"]
    return plain


def _named(message: dict[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A tool's answer with the name of its tool, which some templates show."""
    if message["role"] != "tool":
        return message
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    return {**message, **({"name": names[message["tool_call_id"]]} if message["tool_call_id"] in names else {})}

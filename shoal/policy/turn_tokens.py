"""The tokens with which the policy would write a turn, up to the one that ends it.

Called by the renderer, for players and for pairs of answers. The chat template says what stands around a turn, and the
tokens continue those of the prompt. It does not deal with prompts, replies or histories.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.errors import Overreach, StateError
from shoal.policy.dialect import MARK, Dialect, said
from shoal.policy.ends import num_shared
from shoal.policy.messages import Message
from shoal.policy.notations import leaves_reasoning_open, reasoning_marks

_ASK = {"role": "user", "content": "."}


class _Around(NamedTuple):
    """What the template writes around a turn of the policy; empty if it shows none."""

    prompt: str = ""
    lead: str = ""
    """White space between the prompt and the turn."""
    closing: str = ""
    """From the turn on, if one of its tokens ends the turn."""
    shows: bool = False


class TurnTokens:
    """The turns of one tokenizer with its chat template."""

    def __init__(
        self, dialect_for: Callable[[Mapping[str, Any]], Dialect], encode: Callable[[str], list[int]],
        notation: str, stop_ids: frozenset[int], eos_id: int,
    ) -> None:  # fmt: skip
        """`dialect_for` gives that of the template for some arguments. The others are the renderer's."""
        self._dialect_for, self._encode = dialect_for, encode
        self._notation, self._stop_ids, self._eos_id = notation, stop_ids, eos_id
        self._around = functools.lru_cache(self._text_around)

    def tokens(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> list[int]:
        """Of the last of these messages, or of a text. Messages are normal, and arguments are what a template takes."""
        if isinstance(messages[-1], str):
            return self._of_text(messages[-1], arguments)
        turn = self._dialect_for(arguments).with_reasoning(messages[-1])
        content, is_text = str(turn["content"]), turn.keys() == {"role", "content"}
        if is_text and not self._around(json.dumps(arguments)).shows:
            return self._of_text(content, arguments)
        text, prompt = self._text([*messages[:-1], turn], arguments, prompt=False), self._text(messages[:-1], arguments)
        tail, begin = prompt.rpartition(_ASK["content"])[2], len(prompt)
        if not text.startswith(prompt):  # a template may begin with the number of messages
            at = text.rfind(tail, 0, text.rfind(content.strip())) if tail else -1
            begin = at + len(tail) if at >= 0 else -1
        if begin >= 0:
            ids = self._continued(prompt, text[begin:])
        else:
            ids, begin = self._encode(text), num_shared(text, prompt)
            shared = num_shared(ids, self._encode(prompt))
            while len(self._encode(text[:begin])) > shared:  # a token of the turn may begin with a letter of the prompt
                begin -= 1
            ids = ids[shared:]
        parts = [content, turn.get("reasoning_content") or ""]
        parts += [call["function"]["name"] for call in turn.get("tool_calls") or ()]
        lost = next((part for part in map(str.strip, parts) if not self._shows(text[begin:], part)), "")
        if lost and not is_text:
            raise StateError(
                f"the chat template leaves out {lost!r:.60} of a turn: leave it out, or put it into the content"
            )
        if lost:  # some templates take thoughts out of the content
            return self._of_text(content, arguments)
        return self._ended(ids, text[begin:], prompt)

    def _shows(self, rest: str, part: str) -> bool:
        """Whether a turn has a part before the token that ends it. No ids are read back: a tokenizer may change texts."""
        end = rest.find(part) + len(part)
        return part in rest and self._stop_ids.isdisjoint(self._encode(rest[:end])[:-1])

    def _of_text(self, text: str, arguments: Mapping[str, Any]) -> list[int]:
        around, opening = self._around(json.dumps(arguments)), reasoning_marks(self._notation)[0]
        if leaves_reasoning_open(around.prompt, self._notation) and text.lstrip().startswith(opening):
            text = text.lstrip().removeprefix(opening).lstrip("\n")
        rest = around.lead + text + around.closing
        return self._ended(self._continued(around.prompt, rest), rest, around.prompt)

    def _continued(self, prompt: str, rest: str) -> list[int]:
        """Token ids of what follows a prompt; as those of a text by itself if its first one takes some of the prompt."""
        begun, ids = self._encode(prompt), self._encode(prompt + rest)
        return ids[len(begun) :] if num_shared(ids, begun) == len(begun) else self._encode(rest)

    def _text_around(self, key: str) -> _Around:
        arguments = json.loads(key)
        try:
            prompt, turn = self._text([_ASK], arguments), self._text([_ASK, said(MARK)], arguments, prompt=False)
        except Overreach:
            raise
        except StateError:
            return _Around()
        begun, found, closing = turn.rpartition(MARK)
        lead = begun.removeprefix(prompt)
        is_ended = found and self._stop_ids.intersection(self._encode(closing))
        return _Around(prompt, "" if lead.strip() else lead, closing if is_ended else "", bool(found))

    def _ended(self, ids: list[int], rest: str, prompt: str) -> list[int]:
        """The ids of a turn, whose text is `rest`, after a prompt, whose thought they close, up to the first token that
        ends it or with one."""
        closing = reasoning_marks(self._notation)[1]
        if leaves_reasoning_open(prompt, self._notation) and closing not in rest:
            ids = [*self._encode(f"\n{closing}\n\n"), *ids]
        ends = [i for i, token in enumerate(ids) if token in self._stop_ids]
        return ids[: ends[0] + 1] if ends else [*ids, self._eos_id]

    def _text(self, messages: Sequence[Message], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        return self._dialect_for(arguments).text(messages, arguments, prompt)

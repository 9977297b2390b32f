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
        decode: Callable[[Sequence[int]], str], notation: str, stop_ids: frozenset[int], eos_id: int,
    ) -> None:  # fmt: skip
        """`dialect_for` gives that of the template for some arguments, `decode` the text with control tokens. The others
        are the renderer's."""
        self._dialect_for, self._encode, self._decode = dialect_for, encode, decode
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
            ids = self._encode(text)
            ids = ids[num_shared(ids, self._encode(prompt)) :]
        ids = self._ended(ids, prompt)
        shown, calls = self._decode(ids), turn.get("tool_calls") or ()
        parts = [content.strip(), turn.get("reasoning_content") or "", *(call["function"]["name"] for call in calls)]
        lost = next((part for part in parts if part not in shown), "")
        if lost and not is_text:
            raise StateError(
                f"the chat template leaves out {lost!r:.60} of a turn: leave it out, or put it into the content"
            )
        return self._of_text(content, arguments) if lost else ids  # some templates take thoughts out of the content

    def _of_text(self, text: str, arguments: Mapping[str, Any]) -> list[int]:
        around, opening = self._around(json.dumps(arguments)), reasoning_marks(self._notation)[0]
        if leaves_reasoning_open(around.prompt, self._notation) and text.lstrip().startswith(opening):
            text = text.lstrip().removeprefix(opening).lstrip("\n")
        return self._ended(self._continued(around.prompt, around.lead + text + around.closing), around.prompt)

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

    def _ended(self, ids: list[int], prompt: str) -> list[int]:
        """The ids of a turn after a prompt, whose thought they close, up to the first token that ends it or with one."""
        closing = reasoning_marks(self._notation)[1]
        if leaves_reasoning_open(prompt, self._notation) and closing not in self._decode(ids):
            ids = [*self._encode(f"\n{closing}\n\n"), *ids]
        ends = [i for i, token in enumerate(ids) if token in self._stop_ids]
        return ids[: ends[0] + 1] if ends else [*ids, self._eos_id]

    def _text(self, messages: Sequence[Message], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        return self._dialect_for(arguments).text(messages, arguments, prompt)

"""The tokens with which the policy would write a turn, up to the one that ends it.

The chat template says what stands around a turn, and the tokens continue those of the prompt.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.chat.messages import text_of
from shoal.chat.stop_tokens import num_shared
from shoal.chat.template_capabilities import ASK, MARK, TemplateCapabilities, calling, said
from shoal.chat.tool_call_formats import leaves_reasoning_open, reasoning_marks, without_thought
from shoal.env import Message
from shoal.errors import StateError


class _Around(NamedTuple):
    """What the template writes around a turn of the policy; empty if it shows none."""

    before: Sequence[Message] = (ASK,)
    """The messages before it: those that were asked for, unless the template refuses them."""
    prompt: str = ""
    shown: str = ""
    """The prompt as the template shows it before a written turn, which may be another; empty if it does not end alike."""
    lead: str = ""
    """White space between the prompt and the turn."""
    closing: str = ""
    """From the turn on, if one of its tokens ends the turn."""
    shows: bool = False
    header: str = ""
    """What the template writes before a turn, and not at the end of a prompt: the policy has to write it."""


class ClosedThought(StateError):
    """A turn has a thought, and its prompt has closed the thought already."""

    def __init__(self) -> None:
        super().__init__(
            "this prompt has closed the thought: leave the thought of the answer out, or turn thinking on by an argument "
            "of the chat template"
        )


class TurnEncoder:
    """The turns of one tokenizer with its chat template."""

    def __init__(
        self, dialect_for: Callable[[Mapping[str, Any]], TemplateCapabilities], encode: Callable[[str], list[int]],
        encode_after: Callable[[str, str], list[int]], notation: str, stop_ids: frozenset[int],
        end_ids: tuple[int, int], call_closing: str,
    ) -> None:  # fmt: skip
        """`dialect_for` gives that of the template for some arguments. `end_ids` end turns that the template leaves open:
        those of text, and those that call tools, whose text ends with `call_closing`. The others are the renderer's."""
        self._dialect_for, self._encode, self._encode_after = dialect_for, encode, encode_after
        self._notation, self._stop_ids = notation, stop_ids
        self._end_ids, self._call_closing = end_ids, call_closing
        self._around = functools.lru_cache(self._text_around)
        self._call_opening = functools.lru_cache(self._opening_of_calls)

    def tokens(self, messages: Sequence[Any], arguments: Mapping[str, Any]) -> list[int]:
        """Of the last of these messages, or of a text. Messages are normal, and arguments are what a template takes."""
        if isinstance(messages[-1], str):
            return self._of_text(messages, messages[-1], arguments)
        turn = self._dialect_for(arguments).with_reasoning(messages[-1])
        content, is_text = text_of(turn), not (turn.get("reasoning_content") or turn.get("tool_calls"))
        around = self._around(_key(messages, arguments))
        prompt = around.prompt
        is_closed, thought, words = self._closed_thought(prompt, content)
        if is_closed and (messages[-1].get("reasoning_content") or thought):
            raise ClosedThought()
        if is_text and not around.shows:
            return self._of_text(messages, content, arguments)
        text = self._text([*around.before, turn], arguments, prompt=False)
        rest = self._rest(text, prompt)
        if rest is None and around.shown and text.startswith(around.shown):
            rest = text[len(around.shown) :]
        if rest is None and is_text:
            return self._of_text(messages, content, arguments)
        if rest is None:
            raise StateError(
                "the chat template does not show this answer as a continuation of its prompt: it ends in "
                f"{prompt[-40:]!r}, and with the answer in {text[-80:]!r}. Write the answer as a text"
            )
        parts = [*_texts_of(turn), turn.get("reasoning_content") or ""]
        parts += [call["function"]["name"] for call in turn.get("tool_calls") or ()]
        lost = next((part for part in map(str.strip, parts) if not self._shows(rest, part)), "")
        if lost and not (is_text and isinstance(turn["content"], str)):
            raise StateError(
                f"the chat template leaves out {lost!r:.60} of a turn: leave it out, or write the whole answer as one text"
            )
        if lost:  # some templates take thoughts out of the content
            if is_closed and words != content and self._shows(rest, words.strip()):
                return self._ended(prompt, rest, bool(turn.get("tool_calls")))
            return self._of_text(messages, content, arguments)
        return self._ended(prompt, rest, bool(turn.get("tool_calls")))

    def _closed_thought(self, prompt: str, text: str) -> tuple[bool, str, str]:
        """Whether a prompt has closed the thought; the thought in a turn's text; and the text after it."""
        opening, closing = reasoning_marks(self._notation)
        thought, found, words = text.partition(closing)
        if not found:
            thought, words = (text, "") if text.lstrip().startswith(opening) else ("", text)
        return prompt.rstrip().endswith(closing), thought.strip().removeprefix(opening), words

    def _rest(self, text: str, prompt: str) -> str | None:
        """What follows a prompt in a text, or follows it without the thought that it has begun; None if the text does not
        continue it."""
        if text.startswith(prompt):
            return text[len(prompt) :]
        bare, opening = without_thought(prompt, self._notation), reasoning_marks(self._notation)[0]
        if not text.startswith(bare):
            return None
        rest = text[len(bare) :]
        if leaves_reasoning_open(prompt, self._notation):
            return self._without_opening(rest, prompt)
        return None if rest.lstrip().startswith(opening) else rest

    def _without_opening(self, text: str, prompt: str) -> str:
        """A turn after a prompt that has opened its thought."""
        opening = reasoning_marks(self._notation)[0]
        begun = prompt[prompt.rfind(opening) + len(opening) :]  # such as a new line
        return text.lstrip().removeprefix(opening).removeprefix(begun) if text.lstrip().startswith(opening) else text

    def _shows(self, rest: str, part: str) -> bool:
        """Whether a turn has a part before the token that ends it, with whatever white space. No ids are read back: a
        tokenizer may change texts."""
        written, wanted = [i for i, sign in enumerate(rest) if not sign.isspace()], "".join(part.split())
        at = "".join(rest.split()).find(wanted)
        end = written[at + len(wanted) - 1] + 1 if wanted and at >= 0 else 0
        return at >= 0 and self._stop_ids.isdisjoint(self._encode(rest[:end]))

    def _of_text(self, messages: Sequence[Any], text: str, arguments: Mapping[str, Any]) -> list[int]:
        around = self._around(_key(messages, arguments))
        if around.header and not text.lstrip().startswith(around.header):  # guard: turns-have-their-header
            raise StateError(
                f"the chat template ignores add_generation_prompt, so a turn has to begin with {around.header!r:.40}: take "
                "the model's own chat template, or let the text begin so"
            )
        is_closed, thought, words = self._closed_thought(around.prompt, text)
        if is_closed and thought:  # guard: no-thought-after-a-closed-one
            raise ClosedThought()
        if is_closed and words != text:
            text = words.lstrip()
        if leaves_reasoning_open(around.prompt, self._notation):
            text = self._without_opening(text, around.prompt)
        lead = around.lead and self._space_before(json.dumps(arguments), text, around.lead)
        return self._ended(around.prompt, lead + text + around.closing)

    def _space_before(self, arguments: str, text: str, lead: str) -> str:
        """White space before a text: that of a turn which only calls tools, if the text begins as such, else `lead`."""
        white, opening = self._call_opening(arguments)
        return white if opening and text.lstrip().startswith(opening) else lead

    def _opening_of_calls(self, arguments: str) -> tuple[str, str]:
        """White space, and the first word, of a turn that only calls tools; empty if the template shows none."""
        given = json.loads(arguments)
        dialect = self._dialect_for(given)
        prompt = dialect.shown([ASK], given) or ""
        turns = [calling("", 0, [("call00000", name)]) for name in ("tool", "other")]
        one, other = (dialect.shown([ASK, turn], given, prompt=False) or "" for turn in turns)
        begun = one[: num_shared(one, other)]
        rest = begun.removeprefix(prompt) if dialect.calls and begun.startswith(prompt) else ""
        words = rest.split(maxsplit=1)
        return (rest[: len(rest) - len(rest.lstrip())], words[0]) if words else ("", "")

    def _text_around(self, key: str) -> _Around:
        before, arguments = json.loads(key)
        dialect = self._dialect_for(arguments)  # what it refuses for all turns is refused here, too
        prompt, turn = dialect.shown(before, arguments), dialect.shown([*before, said(MARK)], arguments, prompt=False)
        if prompt is None or turn is None:
            return _Around() if before == [ASK] else self._around(_key([ASK, ""], arguments))
        begun, found, closing = turn.rpartition(MARK)
        shown = prompt
        if not begun.startswith(prompt):
            bare = dialect.text(before, arguments, prompt=False)
            opening = prompt[num_shared(prompt, bare) :]
            if not opening and before:
                last = {**before[-1], "content": MARK}
                opening = (dialect.shown([*before[:-1], last], arguments) or "").rpartition(MARK)[2]
            shown = _up_to(begun, opening)
            cuts = dialect.cut_marks(arguments)
            # guard: unknown-thoughts-are-not-begun
            if found and not shown and cuts and without_thought(prompt, self._notation) == prompt:
                raise StateError(
                    f"the chat template begins turns with {prompt[-20:]!r} and cuts them at {cuts!r:.60}, which is "
                    "no known mark of thoughts: no turn can be written after this prompt"
                )
        lead = begun.removeprefix(shown) if shown else ""
        is_ended = found and self._stop_ids.intersection(self._encode(closing))
        header = dialect.missing_generation_prompt(before, arguments)
        lead = "" if lead.strip() else lead
        return _Around(before, prompt, shown, lead, closing if is_ended else "", bool(found), header)

    def _ended(self, prompt: str, rest: str, calls: bool = False) -> list[int]:
        """Token ids of a turn, whose text is `rest`, after a prompt, whose thought they close, up to the first token that
        ends it or with one."""
        closing = reasoning_marks(self._notation)[1]
        if leaves_reasoning_open(prompt, self._notation) and closing not in rest:
            rest = f"\n{closing}\n\n{rest}"
        ids = self._encode_after(prompt, rest)
        ends = [i for i, token in enumerate(ids) if token in self._stop_ids]
        calls = calls or bool(self._call_closing and rest.rstrip().endswith(self._call_closing))
        return ids[: ends[0] + 1] if ends else [*ids, self._end_ids[calls]]

    def _text(self, messages: Sequence[Message], arguments: Mapping[str, Any], prompt: bool = True) -> str:
        return self._dialect_for(arguments).text(messages, arguments, prompt)


def _texts_of(turn: Mapping[str, Any]) -> list[str]:
    """The texts of a turn that stand by themselves."""
    content = turn.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _up_to(text: str, opening: str) -> str:
    """A text without the white space after the opening of a turn; empty if it does not end with that opening."""
    words, opened = text.rstrip(), opening.rstrip()
    begun = words + opening[len(opened) :]
    return begun if opened and words.endswith(opened) and text.startswith(begun) else ""


def _key(messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """What is written around the last of these messages depends on this alone."""
    return json.dumps([messages[:-1], arguments])

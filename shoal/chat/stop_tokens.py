"""Which tokens end a turn of the policy: two rules, of which a run has one.

By the control rule every control token ends a turn, except those that the chat template writes within turns. By the
model's rule a turn ends at the tokens with which the model was trained to end it; then control tokens that no template
shows, such as those that are reserved, end nothing. It renders marked turns, and looks at the control tokens around the
marks.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from shoal.chat.template_capabilities import ASK, MARK, calling, said
from shoal.chat.tool_call_formats import WITHIN, reasoning_marks
from shoal.env import Message
from shoal.errors import StateError


class StopTokens:
    """The control tokens of one tokenizer, and where one template writes them."""

    def __init__(
        self,
        render: Callable[[Sequence[Message], Mapping[str, Any], bool], str],
        source: str,
        control: Mapping[int, str],
        notation: str,
        plain: Mapping[int, str],
    ) -> None:
        """`render` gives the text of messages, with template arguments and with or without the prompt. `source` is the
        template, `control` the texts of the control tokens, `plain` those of other tokens that were added."""
        self._render, self._control, self._notation = render, control, notation
        self._ids = {token: index for index, token in control.items() if token}
        self._plain_ids = {token: index for index, token in plain.items() if token.strip()}
        self._shown = any(token in source for token in (*control.values(), *self._plain_ids))
        """Whether the template names a control token. Most do not, and are not rendered before the first text."""

    def control(self, ends: set[int]) -> frozenset[int]:
        """All control tokens, and `ends`, except those that the template writes within a turn."""
        return frozenset((self._control.keys() | ends) - (self.within() - ends))

    def model(self, ends: set[int]) -> frozenset[int]:
        """`ends`, which the model's files name, and the control tokens with which the template ends the last turn and
        earlier ones, if none of those does."""
        if not self._shown:
            return frozenset(ends)
        found, (last, earlier) = set(ends), self._closings
        if found.isdisjoint([*last, *earlier]):
            found.update([*last[:1], *earlier[:1]])
        between = self._control_in(self._after_mark(calling("", 2), part=-2))  # of two calls, so the turn goes on
        last = [token for token in self._control_in(self._after_mark(calling("", 1))) if token not in between]
        if not found.intersection(last):
            found.update(last[-1:])
        return frozenset(found)

    @cached_property
    def ends_no_turn(self) -> bool:
        """Whether the template ends turns by no control token. Then the one that begins the next message may end them, as
        in GLM's."""
        return self._shown and self._closings == ([], [])

    def end_before(self, turn: Message, answer: Message, stop_ids: frozenset[int], usual: int) -> int:
        """The token that ends a turn which the template leaves open: the control token with which the answer begins, if
        that is a stop, else `usual`."""
        closing, followed = self._after_mark(turn), self._after_mark(turn, answer)
        begins = self._control_in(followed[num_shared(closing, followed) :])[:1]
        return begins[0] if stop_ids.intersection(begins) else usual

    def call_closing(self) -> str:
        """The last tag of a turn that calls tools, such as </tool_call>; empty if there is none."""
        text = self._after_mark(calling("", 1)).rstrip()
        return text[text.rfind("<") :] if "<" in text else ""

    def at_last(self, eos: int) -> int:
        """The token that ends the last turn of a conversation: `eos`, unless the template ends earlier turns alone."""
        last, earlier = self._closings if self._shown else ([], [])
        return earlier[0] if earlier and not last else eos

    @cached_property
    def _closings(self) -> tuple[list[int], list[int]]:
        """Control tokens with which the template ends the last turn of a conversation, and an earlier one."""
        closing, followed = self._after_mark(said(MARK)), self._after_mark(said(MARK), ASK)
        closed = closing[: num_shared(closing, followed)] if followed else closing
        if both := self._control_in(closed) or [
            self._plain_ids[match[0]] for match in _matches(self._plain_ids, closed)
        ]:
            return both, both
        # What the next message begins with is no end, nor what a turn begins with, where a template always opens one.
        shared = num_shared(followed[::-1], self._rendered([ASK])[::-1])
        begun = self._control_in(self._rendered([ASK, said(MARK)]).partition(MARK)[0])
        return [one for one in self._control_in(closing) if one not in begun], self._control_in(
            followed[: len(followed) - shared]
        )

    def within(self, whole: bool = False) -> set[int]:
        """Control tokens that the template writes between the beginning of a turn and its end; if `whole`, also the last
        one of a turn that calls tools."""
        if not self._shown:
            return set()
        named = {*reasoning_marks(self._notation), *WITHIN.get(self._notation, ())}
        inner = {index for index, token in self._control.items() if any(token in name for name in named)}
        turns = [
            said(MARK),
            said(MARK, "reasonmark"),
            calling("", 1),
            {**calling("", 1), "reasoning_content": "reasonmark"},
        ]
        for turn in turns:
            try:
                text, prompt = self._render([ASK, turn], {}, False), self._render([ASK], {}, True)
            except StateError:
                continue  # the template refuses such turns: it writes nothing within them
            begin, end = num_shared(text, prompt), text.rfind(MARK)
            found = [match for match in _matches(self._ids, text) if match.end() > begin]
            inner.update(self._ids[match[0]] for match in found if match.start() < end)
            if "tool_calls" in turn:  # the last one ends the turn
                ending = found if whole else found[:-1]
                inner.update(self._ids[match[0]] for match in ending if match.start() > end)
        return inner

    def _after_mark(self, turn: Message, *after: Message, part: int = -1) -> str:
        """What the template writes after the last mark of a turn, or between the last two; empty if it refuses the turn."""
        parts = self._rendered([ASK, turn, *after]).split(MARK)
        return parts[part] if len(parts) > -part else ""

    def _rendered(self, messages: Sequence[Message]) -> str:
        try:
            return self._render(messages, {}, False)
        except StateError:
            return ""

    def _control_in(self, text: str) -> list[int]:
        return [self._ids[match[0]] for match in _matches(self._ids, text)]


def _matches(tokens: Iterable[str], text: str) -> list[re.Match[str]]:
    """Tokens in a text. Found without the tokenizer: a broken one should fail at the first text, not here."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return list(re.finditer("|".join(map(re.escape, longest_first)), text)) if longest_first else []


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)

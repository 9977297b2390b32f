"""A whole conversation as a template would show it now, with open places for the tokens that the policy wrote.

What the policy wrote is never tokenised again. Each turn is rendered as marks, and the text between the marks belongs
to the environment.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal.chat.messages import BadMessage, Written, normal
from shoal.chat.stop_tokens import num_shared
from shoal.chat.template_capabilities import ASK, TemplateCapabilities, calling, said
from shoal.env import Message
from shoal.errors import StateError

Part = Literal["reasoning", "visible"]


class Words(NamedTuple):
    """Text of the environment, or of the template."""

    text: str
    after: Literal["", "text", "calls"]
    """What the text follows: nothing, or a turn of the policy that ends with text or with tool calls. The turn already
    has the end token that the policy wrote, so the renderer leaves out the template's."""
    prompted: str | None = None
    """The words that the policy saw here when it began to write; None if the next turn follows all of `text`. The turn's
    tokens contain what `text` adds to them."""


class TurnSpan(NamedTuple):
    """Where tokens of a turn of the policy go."""

    turn: int
    part: Part
    """"visible" is the turn without its reasoning, or the whole turn if it has none. It includes the stop token."""


def places(
    dialect: TemplateCapabilities, items: Sequence[Message | Written], arguments: Mapping[str, Any], mark: str
) -> list[Words | TurnSpan]:
    """The parts of the conversation in order, up to where the policy begins its next turn.

    Raises `StateError` if the template does not show a turn, and `BadMessage` for a malformed message.
    """
    if dialect.varies(arguments):
        raise StateError(
            'the chat template writes other text around a turn for other words of it: use history = "append"'
        )
    if cuts := dialect.cut_marks(arguments):  # guard: turns-are-not-cut
        raise StateError(
            f"the chat template leaves out parts of earlier turns at {cuts!r:.60}, which is no known mark of "
            'thoughts: use history = "append"'
        )
    for before, item in itertools.pairwise(items):
        is_result = not isinstance(item, Written) and item.get("role") == "tool"
        if is_result and isinstance(before, Written) and not before.calls:
            demand_results(dialect)
    marks = _Marks(mark)
    items = _without_hidden(dialect, items, marks, arguments)
    content = True
    messages = _messages(dialect, items, marks, content)
    text = dialect.shown(messages, arguments)
    if text is None or any(_swapped(text, marks.of(item.turn)) for item in items if isinstance(item, Written)):
        content = False
        messages = _messages(dialect, items, marks, content)
        text = dialect.text(messages, arguments)
    for item in items:
        if isinstance(item, Written):
            for mark, most in zip(marks.of(item.turn), (1, 1, len(item.calls)), strict=True):
                demand_once(text, mark, most, f"turn {item.turn}")
    found: list[Words | TurnSpan] = []
    begin: int = 0
    after: Literal["", "text", "calls"] = ""
    for index, item in enumerate(items):
        if not isinstance(item, Written):
            continue
        reasoning, visible, called = (text.find(mark, begin) for mark in marks.of(item.turn))
        shown = [at for at in (reasoning, visible, called) if at >= 0]
        if max(visible, called) < 0:
            raise StateError(f"the chat template does not show turn {item.turn}: multi-turn play is impossible")
        words = text[begin : min(shown)]
        prompted = None
        if not item.reasoning or reasoning >= 0 or visible < 0:
            last = marks.last_of(text[:begin])
            prompted = _after(dialect.text(messages[:index], arguments), last)
            newest = _messages(dialect, [ASK, item._replace(reasoning=reasoning >= 0)], marks, content and visible >= 0)
            opening = _opening(dialect, newest, marks.of(item.turn), arguments)
            opened = dialect.reasoning_start(words) if reasoning >= 0 and item.opens_reasoning is not None else -1
            own = words[len(prompted) : opened] if words.startswith(prompted) and len(prompted) <= opened else None
            adds = dialect.reasoning and not item.opens_reasoning  # the mark is the template's, not the turn's
            if opened >= 0 and (own is None or adds):
                prompted = words if adds else words[:opened]
            elif words.startswith(prompted):
                prompted = _seen(dialect, words, prompted, opening)
            elif reasoning < 0 <= visible:  # the template shows where the turn's text begins
                prompted = words.removesuffix(opening or "")
            else:
                bare = _after(dialect.text(messages[:index], arguments, prompt=False), last)
                if prompted == bare and opening and words.endswith(opening):  # prompts end with the last message
                    prompted = words.removesuffix(opening)
                else:
                    prompted = _up_to_turn(words, prompted, bare, item.turn)
        found.append(Words(words, after, prompted))
        if item.reasoning and reasoning >= 0:
            found.append(TurnSpan(item.turn, "reasoning"))
        found.append(TurnSpan(item.turn, "visible"))
        last = marks.of(item.turn)[2 if called >= 0 else 1]
        begin, after = text.rfind(last) + len(last), "calls" if called >= 0 else "text"
    return [*found, Words(text[begin:], after)]


def demand_once(text: str, mark: str, most: int, whose: str) -> None:
    """Refuse a template that shows a mark of a turn in other places, too: none of them is where the turn ends."""
    if text.count(mark) > most:  # guard: turns-are-shown-once
        raise StateError(
            f"the chat template shows a text of {whose} again elsewhere, so it does not show where the turn is: multi-turn "
            "play is impossible"
        )


def demand_results(dialect: TemplateCapabilities) -> None:
    """Refuse the result of a tool after a turn that calls none, if the template shows it only after calls."""
    if not dialect.results:
        raise StateError(
            "the environment answers a turn that calls no tool with the result of one (role tool), and the chat template "
            "shows none there: let it answer as the user"
        )


def _swapped(text: str, marks: tuple[str, str, str]) -> bool:
    """Whether the template shows the text of a turn after its tool calls. The policy wrote it before them."""
    _, visible, called = (text.find(mark) for mark in marks)
    return 0 <= called < visible


def _after(text: str, last: str) -> str:
    """The words after the last mark: what the policy saw between its previous turn and this one."""
    if not last:
        return text
    return text[text.rfind(last) + len(last) :] if last in text else ""


def _seen(dialect: TemplateCapabilities, words: str, prompted: str, opening: str | None) -> str:
    """Of the words before a turn those that the policy saw, and an empty thought that the template has put there since.
    What else is added must be `opening`, with which the template begins the newest turn: that is the policy's own."""
    added = words.removeprefix(prompted)
    thought = dialect.empty_thought(added)
    rest = added[len(thought) :]
    if rest.strip() and opening is not None and rest != opening:  # guard: turns-keep-their-words
        raise StateError(
            f'the chat template adds {rest.strip()!r:.40} to a turn when it is shown again: use history = "append"'
        )
    return prompted + thought


def _opening(
    dialect: TemplateCapabilities, newest: Sequence[Message], marks: tuple[str, str, str], arguments: Mapping[str, Any]
) -> str | None:
    """What the template writes between a prompt and the first mark of the turn after it, but for an empty thought; None if
    it shows another prompt."""
    prompt, text = dialect.shown(newest[:1], arguments), dialect.shown(newest, arguments, prompt=False)
    if prompt is None or text is None or not text.startswith(prompt):
        return None
    opening = text[len(prompt) : min(at for mark in marks if (at := text.find(mark)) >= 0)]
    return opening[len(dialect.empty_thought(opening)) :]


def _up_to_turn(words: str, prompted: str, bare: str, turn: int) -> str:
    """What the policy saw of the words before its turn, which the template now shows in another way: without the reminder
    that it puts at the last message, or with another beginning of the turn itself. `bare` is `prompted` without what
    opens a turn."""
    said = num_shared(prompted, bare)
    if words.startswith(prompted[:said]):
        return prompted
    opening = prompted[said:]
    at = words.rfind(opening) if opening else -1
    if at < 0:  # guard: turns-begin-where-the-template-opens-them
        raise StateError(
            f"the chat template now shows what was said before turn {turn} in another way, and not where the turn "
            'begins: use history = "append"'
        )
    return words[: at + len(opening)]


class _Marks:
    """Texts that occur in no message: for each turn one for its reasoning, its visible text and its tool calls."""

    def __init__(self, mark: str) -> None:
        self._name = f"{mark}."

    def of(self, turn: int) -> tuple[str, str, str]:
        return f"{self._name}{turn}r;", f"{self._name}{turn}v;", f"{self._name}{turn}c;"

    def last_of(self, text: str) -> str:
        """The mark at the end of a text; empty if there is none."""
        at = text.rfind(self._name)
        return text[at:] if at >= 0 else ""


def _without_hidden(
    dialect: TemplateCapabilities, items: Sequence[Message | Written], marks: _Marks, arguments: Mapping[str, Any]
) -> list[Message | Written]:
    """The conversation without the empty thoughts that the template does not show."""
    bare = [
        item._replace(reasoning=False) if isinstance(item, Written) and item.empty and dialect.reasoning else item
        for item in items
    ]
    text = None if bare == list(items) else dialect.shown(_messages(dialect, bare, marks, True), arguments)
    if text is None:
        return list(items)
    told: list[Message | Written] = []
    for item, plain in zip(items, bare, strict=True):
        found = [text.find(mark) for mark in marks.of(item.turn)] if isinstance(item, Written) else []
        first = min((at for at in found if at >= 0), default=0)
        told.append(item if dialect.ends_thought(text[:first]) else plain)
    return told


def _messages(
    dialect: TemplateCapabilities, items: Sequence[Message | Written], marks: _Marks, content: bool
) -> list[dict[str, Any]]:
    """Normal messages, with marks in the policy's turns. With `content`, a turn that calls tools has text, too."""
    told: list[Message] = []
    for item in items:
        if isinstance(item, Written):
            reasoning, visible, called = marks.of(item.turn)
            turn = calling(visible if content else "", 0, item.calls, called) if item.calls else said(visible)
            if item.reasoning:
                turn = dialect.with_reasoning({**turn, "reasoning_content": reasoning}, item.separator)
            told.append(turn)
        else:
            told.append(item)
    if len({item.turn for item in items if isinstance(item, Written)}) < sum(isinstance(i, Written) for i in items):
        raise BadMessage("a history contains a turn twice: give each turn another number")
    return normal(told)

"""What one seat of a rollout reads before each of its turns, and whether that continues its row or opens another.

Usually a row goes on: the reply follows the tokens so far. A new row opens if the seat acts for the first time, if the
environment restarts its history, or if the chat template no longer shows the history as the row has it, for example
because it drops earlier thoughts. The policy's turns keep the tokens that it wrote; they are never tokenised again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shoal.chat.messages import BadMessage, Written, as_messages
from shoal.chat.renderer import Renderer, opening_key
from shoal.chat.template_capabilities import said
from shoal.chat.tool_calls import NOTATIONS, has_reasoning, opens_reasoning, reasoning_length, reasoning_separator
from shoal.env import Action, Message
from shoal.errors import Overreach, StateError
from shoal.protocol.messages import ENVIRONMENT

Item = Message | Written


@dataclass
class TalkRow:
    """A row of a rollout as it grows."""

    tokens: list[int] = field(default_factory=list)
    author: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the policy's tokens; empty if the turns came without them."""

    def append(self, token_ids: Sequence[int], author: int) -> None:
        self.tokens.extend(token_ids)
        self.author.extend([author] * len(token_ids))

    def num_in_turn(self) -> int:
        """Tokens that the policy has written since the environment's last word. If the environment says nothing, the turn
        goes on, and its limit holds for both parts."""
        return next((i for i, author in enumerate(reversed(self.author)) if author == ENVIRONMENT), len(self.author))


class WrittenTurn(NamedTuple):
    """What the policy wrote in one turn."""

    token_ids: tuple[int, ...]
    action: Action


class Next(NamedTuple):
    """What a seat reads next."""

    token_ids: Sequence[int]
    """Tokens that continue the row, or the whole opening of a new one."""
    opens: bool
    """Whether a new row opens."""
    thinking: bool
    """Whether the template has begun the policy's reasoning."""
    items: list[Item]
    """The history, including this; empty if nothing needs it."""


class SeatHistory:
    """The history of one seat."""

    def __init__(
        self, renderer: Renderer, arguments: Mapping[str, Any], by_template: bool, turns: list[WrittenTurn]
    ) -> None:
        """With `by_template`, the template decides what is shown of earlier turns. `turns` are those of all seats, in
        order."""
        self.renderer, self.arguments, self.turns = renderer, arguments, turns
        self.by_template = by_template
        self.row: TalkRow | None = None
        """The row that the seat's next turn continues; None before its first."""
        self.index = 0
        """The number of that row in the rollout."""
        self.items: list[Item] = []
        self._cuts: dict[int, int] = {}
        self._opening: Sequence[Message] = ()
        self._opening_key = ""
        self._replied: object = None
        """What the seat was told last, since its opening."""

    def opening(self, messages: Sequence[Message]) -> Next:
        """The first row of the seat."""
        prompt = self.renderer.open(messages, self.arguments)
        self._begin(messages)
        return Next(prompt.token_ids, True, prompt.thinking, list(messages) if self.by_template else [])

    def after(self, reply: object, written: int) -> Next:
        """What follows turn number `written`, the seat's latest. Raises `BadMessage` and `StateError`."""
        named = self._with_call_ids(reply, written)
        try:
            return self._after(named, written)
        except Overreach:
            raise
        except StateError:
            if named is reply:
                raise
            return self._after(reply, written)  # the template refuses the ids that the policy wrote

    def _after(self, reply: object, written: int) -> Next:
        self._replied = reply
        if not self.by_template:
            self._opening_key = self._opening_key or opening_key(self._opening)
            kind, end = self._kind(written), self._end(written)
            prompt = self.renderer.go_on(reply, self.arguments, self._opening_key, kind, end)
            return Next(prompt.token_ids, False, prompt.thinking, [])
        assert self.row is not None, "a seat opens its view before it acts"
        told = as_messages(reply)
        items = [*self.items, self._written(written, told), *told]
        token_ids = self._filled(items)
        thinking = self.renderer.opens_thought(token_ids)
        if token_ids[: len(self.row.tokens)] == self.row.tokens:
            return Next(token_ids[len(self.row.tokens) :], False, thinking, items)
        return Next(token_ids, True, thinking, items)

    def anew(self, reply: object) -> Next:
        """A new row, with the whole history that the environment gives. Raises `BadMessage` and `StateError`."""
        items: list[Item] = (
            list(reply) if isinstance(reply, Sequence) and not isinstance(reply, str) else [*as_messages(reply)]
        )
        last = max((i for i, item in enumerate(items) if isinstance(item, Written)), default=-1)
        if any(isinstance(item, Written) and not 0 <= item.turn < len(self.turns) for item in items):
            raise BadMessage(f"a history names a turn that was not written: turns are 0 to {len(self.turns) - 1}")
        tail = [item for item in items[last + 1 :] if not isinstance(item, Written)]
        if not tail:
            raise BadMessage("a history ends with a turn of the policy: end it with a message")
        if last < 0:
            return self.opening(tail)
        named = [self._named(item) if isinstance(item, Written) else item for item in items]
        self._begin([item for item in items if not isinstance(item, Written)])
        token_ids = self._filled(named)
        return Next(token_ids, True, self.renderer.opens_thought(token_ids), named if self.by_template else [])

    def asked(self) -> list[Message]:
        """Messages of which the prompt of the next turn is made, with "." for what the policy wrote."""
        if self.by_template:
            return [said(".") if isinstance(item, Written) else item for item in self.items]
        return [*self._opening, *(() if self._replied is None else (said("."), *as_messages(self._replied)))]

    def _begin(self, messages: Sequence[Message]) -> None:
        self._opening, self._opening_key, self._replied = messages, "", None

    def _filled(self, items: Sequence[Item]) -> list[int]:
        """Token ids of a history. The policy's turns have the tokens that it wrote."""
        ids: list[int] = []
        for segment in self.renderer.history(items, self.arguments):
            if segment.turn < 0:
                ids.extend(segment.token_ids)
                continue
            written, cut = self.turns[segment.turn].token_ids, self._thought(segment.turn)
            ids.extend(written[:cut] if segment.part == "reasoning" else written[cut:])
        return ids

    def _thought(self, number: int) -> int:
        """How many tokens of a turn are its reasoning. A template that leaves reasoning out has no place for them."""
        if number not in self._cuts:
            turn = self.turns[number]
            self._cuts[number] = reasoning_length(turn.token_ids, turn.action, self.renderer.decode)
        return self._cuts[number]

    def _kind(self, number: int) -> Literal["", "text", "calls"]:
        """Whether a turn called tools; empty if that is not known, as of a malformed call."""
        if not self.arguments.get("tools"):
            return ""
        action = self.turns[number].action
        if action.tool_calls:
            return "calls"
        return "" if action.problems or action._notation not in NOTATIONS else "text"

    def _named(self, item: Written) -> Written:
        """A turn of a history, with whether it contains reasoning: we, not the environment, say so."""
        action = self.turns[item.turn].action
        reasoning, empty, separator = (
            self._thought(item.turn) > 0,
            not has_reasoning(action),
            reasoning_separator(action),
        )
        opens, end = opens_reasoning(action), self._end(item.turn)
        return item._replace(reasoning=reasoning, empty=empty, separator=separator, end=end, opens_reasoning=opens)

    def _end(self, number: int) -> int:
        """The token that ended a turn; -1 if it was cut."""
        last = self.turns[number].token_ids[-1]
        return last if last in self.renderer.stop_ids else -1

    def _with_call_ids(self, reply: object, number: int) -> object:
        """A reply whose results without an id have those that the policy wrote in its calls, in order; the reply itself if
        it wrote none."""
        ids = [call.id for call in self.turns[number].action.tool_calls] if self.arguments.get("tools") else []
        if not any(ids) or isinstance(reply, str):
            return reply
        messages = as_messages(reply)
        given = [message.get("tool_call_id") for message in messages if message.get("role") == "tool"]
        told, left = [], (one for one in ids if not one or one not in given)
        for message in messages:
            lacks = message.get("role") == "tool" and not message.get("tool_call_id")
            own = next(left, "") if lacks else ""
            told.append({**message, "tool_call_id": own} if own else message)
        return told

    def _written(self, number: int, told: Sequence[Message]) -> Written:
        """The turn that the messages answer. Its tool calls have the ids and names that the results use."""
        turn = self.turns[number]
        results = [message for message in told if message.get("role") == "tool"]
        calls = [call.name for call in turn.action.tool_calls]
        if not calls and self._kind(number) != "text":
            calls = [str(result.get("name") or "tool") for result in results]
        ids = [str(result.get("tool_call_id") or "") for result in results]
        named = [
            (ids[i] if i < len(ids) and ids[i] else f"t{number:03d}c{i:04d}", name) for i, name in enumerate(calls)
        ]
        return self._named(Written(number, calls=tuple(named)))

"""What the policy wrote in one turn, as an environment gets it: a text that can also give its parts.

Made by `conversation`. It is a `str`, and is parsed only when an environment asks for a part.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.envs.parse import CHANNELS, Parsed, ToolCall, parse
from shoal.policy.messages import REASONING_SEPARATOR
from shoal.policy.notations import reasoning_marks


class Action(str):
    """The turn's text, without its end token."""

    _notation: str
    _thinking: bool
    _tools: Sequence[Mapping[str, Any]]
    _parsed: Parsed | None

    def __new__(
        cls, text: str, notation: str = "", thinking: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> "Action":
        """`notation` is that of tool calls. `thinking` says whether the prompt had begun the reasoning."""
        action = super().__new__(cls, text)
        action._notation, action._thinking, action._tools, action._parsed = notation, thinking, tools, None
        return action

    @property
    def parsed(self) -> Parsed:
        """All parts."""
        if self._parsed is None:
            self._parsed = parse(str(self), self._notation, self._thinking, self._tools)
        return self._parsed

    @property
    def reasoning(self) -> str:
        """What the policy thought before it spoke; empty if nothing."""
        return self.parsed.reasoning

    @property
    def visible(self) -> str:
        """What it said, without reasoning, tool calls and surrounding white space."""
        return self.parsed.visible

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that it called, with their arguments."""
        return self.parsed.calls

    @property
    def problems(self) -> tuple[str, ...]:
        """What is malformed in its tool calls, one line each."""
        return self.parsed.problems


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

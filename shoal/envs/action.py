"""What the policy wrote in one turn, as an environment gets it: a text that can be asked for its parts.

Made by `conversation`. It is a plain text to an environment that wants no more, and it is taken apart only when asked.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.envs.parse import Parsed, ToolCall, parse


class Action(str):
    """The turn's text, without its end token."""

    _notation: str
    _thinking: bool
    _tools: Sequence[Mapping[str, Any]]
    _parsed: Parsed | None

    def __new__(
        cls, text: str, notation: str = "", thinking: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> "Action":
        """`notation` names the notation of tool calls, `thinking` says that the prompt had begun the reasoning."""
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
        """What it said, without reasoning, tool calls and the space around."""
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
    """How many of a turn's tokens are its reasoning; a token on the border belongs to it.

    With it, a turn's tokens fill the places of `Renderer.history`: what the policy wrote is never made into tokens again.
    """
    begins = action.parsed.begins
    return bisect.bisect_left(range(len(token_ids)), begins, key=lambda count: len(decode(token_ids[:count])))

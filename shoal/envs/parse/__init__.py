"""What the policy wrote, taken apart: reasoning, visible text and tool calls."""

from shoal.envs.parse.turn import NOTATIONS, PARSERS, Parsed, ToolCall, parse

__all__ = ["NOTATIONS", "PARSERS", "Parsed", "ToolCall", "parse"]

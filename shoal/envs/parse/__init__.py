"""What the policy wrote, taken apart: reasoning, visible text and tool calls."""

from shoal.envs.parse.turn import FAMILIES, PARSERS, Parsed, ToolCall, parse

__all__ = ["FAMILIES", "PARSERS", "Parsed", "ToolCall", "parse"]

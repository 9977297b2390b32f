"""What the policy wrote, taken apart: reasoning, visible text and tool calls."""

from shoal.envs.parse.turn import CHANNELS, NOTATIONS, PARSERS, Parsed, ToolCall, parse

__all__ = ["CHANNELS", "NOTATIONS", "PARSERS", "Parsed", "ToolCall", "parse"]

"""What the policy wrote, taken apart: reasoning, visible text and tool calls."""

from shoal.env import Parsed, ToolCall
from shoal.envs.parse.turn import CHANNELS, NOTATIONS, PARSERS, parse

__all__ = ["CHANNELS", "NOTATIONS", "PARSERS", "Parsed", "ToolCall", "parse"]

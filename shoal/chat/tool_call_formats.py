"""The notation in which a model writes reasoning and tool calls, recognised by marks in the text of its chat template.

The parsers of environments have the same names.
"""

NOTATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|call|>")),
    ("atem", ("<atem:function_calls>",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("lfm", ("<|tool_list_start|>",)),
    ("lfm", ("<|tool_call_start|>",)),
    ("gemma", ("<|tool_call>call:",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen-xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama", ("<|start_header_id|>", '"parameters": ')),
)
"""Name of a notation, and the texts that its templates contain. The first match is taken."""

REASONING = {"gemma": ("<|channel>thought", "<channel|>")}
"""Texts that open and close reasoning in notations that do not use `THINK`."""

THINK = ("<think>", "</think>")

WITHIN = {
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "harmony": ("<|constrain|>",),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
"""Control tokens that a policy with this notation writes within a turn, whether or not its template shows them."""


def notation_of(template: str) -> str:
    """The name of the notation; empty if the template has no known marks."""
    return next((name for name, marks in NOTATIONS if all(mark in template for mark in marks)), "")


def reasoning_marks(notation: str) -> tuple[str, str]:
    """Texts that open and close reasoning."""
    return REASONING.get(notation, THINK)


def leaves_reasoning_open(text: str, notation: str) -> bool:
    """Whether a prompt ends inside the policy's reasoning."""
    opening, closing = reasoning_marks(notation)
    return text.rstrip().endswith(opening) and text.rfind(opening) > text.rfind(closing)


def without_thought(text: str, notation: str) -> str:
    """A prompt without the thought that it opens, or opens and closes, at its end."""
    opening, closing = reasoning_marks(notation)
    begun, found, rest = text.rpartition(opening)
    return begun if found and rest.strip() in ("", closing) else text

"""The chat templates that the wheel of TRL 1.16 ships (Apache-2.0, see their LICENSE), each with a small tokenizer.

The tokenizer knows every byte and, as control tokens, the marks that the template names, as the model's own would.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shoal.chat.renderer import Renderer
from shoal.config import TinyPolicy
from shoal.models.chat_template_files import ChatTemplates
from shoal.models.config import write_json
from shoal.models.random_model import tiny_spec
from shoal.models.tokenizer_loader import OpenTokenizer

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

WITHOUT_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
"""Templates that refuse tool results, or do not show them."""
WITHOUT_CALLS = WITHOUT_RESULTS | {"deepseek_r1_distill", "idefics3", "lfm2", "llama3", "qwen2_5_vl", "smolvlm"}
"""Templates that show no tool calls. A policy may write them as text."""
WITHOUT_THOUGHT = WITHOUT_CALLS | {
    "deepseekv3", "gemma4_v2", "lfm2_v2", "llama3_1", "llama3_2", "qwen2_5", "qwen3_5_nothink", "qwen3_instruct_2507",
    "qwen3_vl",
}  # fmt: skip
"""Templates that show no thought, or whose prompt closes it."""

CONTROL = re.compile(
    r"<\|[a-zA-Z_\"]+\|?>|<[a-z_]+\|>|<｜[^｜\s]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>|<end_of_utterance>|</s>"
)
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>", "diffusion": "<turn|>", "gemma4": "<turn|>",
    "gemma": "<end_of_turn>", "glm": "<|endoftext|>", "gptoss": "<|return|>", "idefics": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>", "llama": "<|eot_id|>", "llava": "</s>", "muse": "<|eot|>", "phi": "<|end|>",
}  # fmt: skip
"""End token by the beginning of a template's name; `<|im_end|>` for the others."""

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": "A number."} for name in ("a", "b")},
            "required": ["a", "b"],
        },
    },
}
"""A tool."""


def end_of(name: str) -> str:
    return next((end for begin, end in ENDS.items() if name.startswith(begin)), "<|im_end|>")


def tokenizer_of(name: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = sorted({*CONTROL.findall((FOLDER / f"{name}.jinja").read_text()), end_of(name), "<bos>"})
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


@functools.cache
def renderer_of(name: str, stops: str = "model", normalizer: normalizers.Normalizer | None = None) -> Renderer:
    """A renderer with this template."""
    tokenizer, end = tokenizer_of(name), end_of(name)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    spec = dataclasses.replace(
        tiny_spec(TinyPolicy()), vocab_size=tokenizer.get_vocab_size(), eos_ids=(tokenizer.token_to_id(end),)
    )
    templates = ChatTemplates((FOLDER / f"{name}.jinja").read_text())
    return Renderer(OpenTokenizer(tokenizer, {"bos_token": "<bos>", "eos_token": end}), templates, spec, stops)


def directory_of(name: str, directory: Path) -> Path:
    """The files of a checkpoint with this template, without weights."""
    tokenizer, end = tokenizer_of(name), end_of(name)
    tokenizer.save(str(directory / "tokenizer.json"))
    spec = tiny_spec(TinyPolicy()).to_hf()
    changes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(end),
        "pad_token_id": None,
    }
    write_json(directory / "config.json", spec | changes)
    write_json(directory / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": end})
    (directory / "chat_template.jinja").write_text((FOLDER / f"{name}.jinja").read_text())
    return directory


def spell(renderer: Renderer, token_ids: Any) -> str:
    """The text of tokens, control tokens included."""
    return str(renderer._tokenizer.decode(list(token_ids), skip_special_tokens=False))

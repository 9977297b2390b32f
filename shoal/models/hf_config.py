"""What everything but the model itself must know of a policy that `transformers` computes, read from its JSON files.

Light: it imports neither torch nor transformers, so it knows no defaults of an architecture: what `config.json` leaves out
cannot be known here.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import StateError
from shoal.models.config import LARGEST, NO_CONFIG, TARGETS, Feature, token_id_fault, turn_ends_of
from shoal.models.safetensors_header import bad_value, decode_strictly, find_whole, read_capped
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_TENSORS

_NAMES = {
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
}  # fmt: skip
"""What architectures call the same number."""

_WIDTHS = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
"""What they call the inner width of an MLP, or of one expert."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

SIZES = (
    *(key for keys in _NAMES.values() for key in keys), "num_key_value_heads", "head_dim",
    *_WIDTHS,
)  # fmt: skip
"""Keys that decide the shapes of tensors."""

_LEARNS_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "biogpt"})
"""Architectures with a table of learned numbers for each position. No key of their configs says so."""

OWN_KEYS = frozenset({
    "attn_implementation", "experts_implementation", "auto_map", "dtype", "torch_dtype", "name_or_path", "fusion_config",
    "distributed_config", "transformers_weights", "quantization_config", "output_attentions", "output_hidden_states",
    "num_labels", "id2label", "label2id",
})  # fmt: skip
"""Keys of a `config.json` that say how and from where to load, which a file may not decide; nor any that begins with _.
And the labels of a classifier: a language model has none, and transformers makes a name for each of any number."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""What `{"__float__": ...}` stands for: transformers writes the floats so that JSON lacks."""


_ACTIVATION_WIDTHS = 40
"""Numbers that a layer makes of one token, in widths."""


@dataclass(frozen=True)
class HFConfig:
    """A policy of any architecture: a `ModelConfig`."""

    family: str
    """`model_type`, by which transformers knows it."""
    vocab_size: int
    max_positions: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    eos_ids: tuple[int, ...]
    turn_ends: tuple[int, ...] = ()
    experts: int = 0
    """Of each layer, of which routers choose a few for each token; 0 if there are none."""
    mlp_width: int = 0
    """Inner width of an MLP, or of one expert."""
    tied: bool = False
    """The output head shares the embedding."""
    stored_values: int = 0
    """Of all tensors in its files; 0 if there are none."""

    largest_stored: int = 0
    """Values of the largest of them."""

    def supports(self, feature: Feature) -> bool:
        return False

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def layer_matrices(self) -> dict[str, tuple[int, ...]]:
        return {}

    def num_parameters(self) -> int:
        """Those of the files, or what a usual model of this shape has at most."""
        if self.stored_values:
            return self.stored_values
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        experts = max(1, self.experts) * 3 * self.width * self.mlp_width + self.experts * self.width
        rows = (2 - self.tied) * self.vocab_size + (self.max_positions if self.family in _LEARNS_POSITIONS else 0)
        return self.layers * (attention + experts + 8 * self.width) + rows * self.width

    def layer_parameters(self) -> int:
        return self.num_parameters() // self.layers

    def adapter_parameters(self, rank: int, targets: Sequence[str] = TARGETS) -> int:
        """Of every matrix, whatever the targets."""
        attention = 4 * self.width + 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * rank * (attention + 3 * max(1, self.experts) * (self.width + self.mlp_width))

    def largest_tensor(self) -> int:
        return self.largest_stored or self.vocab_size * self.width

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes

    def layer_activations(self) -> int:
        """In widths: residual, heads, an MLP of four widths, and what its gate computes."""
        return _ACTIVATION_WIDTHS * max(self.width, self.heads * self.head_dim)

    def forward_activations(self) -> int:
        return self.layer_activations()

    def arranged_values(self) -> int:
        return 0

    @staticmethod
    def from_directory(directory: Path) -> "HFConfig":
        """Read the JSON files. Raises `StateError` if they do not describe a language model that we can run."""
        config = read_config(directory)
        path, text = Path(directory) / "config.json", text_config(config)
        architecture = config.get("model_type")
        if not isinstance(architecture, str) and "model_type" in config:
            raise bad_value(path, "model_type", architecture, ["str"])
        if not architecture:
            raise StateError(f"{path} {NO_CONFIG}: it has no model_type. Copy or download the model again")
        found = {name: _number(text, name, path) for name in _NAMES}
        numbers, keys = {name: number for name, (number, _) in found.items()}, {name: found[name][1] for name in found}
        kv_heads = text.get("num_key_value_heads")
        head_dim = text.get("head_dim")
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        eos_ids = tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
        experts = [count for key in _EXPERTS if isinstance(count := text.get(key), int)]
        widths = [width for key in _WIDTHS if isinstance(width := text.get(key), int) and not isinstance(width, bool)]
        turn_ends = turn_ends_of(Path(directory) / "generation_config.json", numbers["vocab_size"])
        spec = HFConfig(
            architecture[:40],
            kv_heads=kv_heads if isinstance(kv_heads, int) else numbers["heads"],
            head_dim=head_dim if isinstance(head_dim, int) else -(-numbers["width"] // max(1, numbers["heads"])),
            eos_ids=eos_ids,
            turn_ends=() if set(turn_ends) == set(eos_ids) else turn_ends,
            experts=max(experts, default=0),
            mlp_width=widths[0] if widths else 4 * numbers["width"],
            tied=text.get("tie_word_embeddings", config.get("tie_word_embeddings")) is True,
            **numbers,
        )
        inner = next((key for key in _WIDTHS if text.get(key) == spec.mlp_width), _WIDTHS[1])
        keys |= {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_width": inner}
        with contextlib.suppress(StateError):
            sizes = [math.prod(one.shape) for one in find_whole(directory).values()]
            spec = replace(spec, stored_values=sum(sizes), largest_stored=max(sizes, default=0))
        outlying = token_id_fault(spec.eos_ids, spec.vocab_size)
        demands = [
            (config.get("is_encoder_decoder") in (None, False), "it has an encoder; only plain language models are known"),
            (
                text.get("is_causal", True),
                f"is_causal is {text.get('is_causal')!r}: tokens would see later ones, so no replay would agree",
            ),
            (not text.get("per_layer_config"), "per_layer_config gives layers numbers of their own; not supported"),
            (not config.get("quantization_config"), "the weights are quantised; use the full-precision model"),
            (spec.layers <= MAX_TENSORS, f"{keys['layers']} = {spec.layers}: more than MAX_TENSORS = {MAX_TENSORS}"),
            *(
                (0 < value <= LARGEST, f"{key} = {value}: not in 1..{LARGEST}")
                for name, key in keys.items()
                for value in [getattr(spec, name)]
            ),
            (not outlying, f"eos_token_id = {[*spec.eos_ids]}: {outlying}"),
        ]  # fmt: skip
        for holds, fault in demands:
            if not holds:
                raise StateError(f"{path}: {fault}. Choose another model, or fix the file")
        return spec


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a directory as it is. Raises `StateError` if it is no JSON object."""
    path = Path(directory) / "config.json"
    return decode_strictly(read_capped(path, MAX_JSON_BYTES), dict[str, Any], path, NO_CONFIG)


def sizes_said(directory: Path, keys: Sequence[str] = SIZES) -> str:
    """What a `config.json` says of a model's sizes, in words."""
    text = text_config(read_config(directory))
    return ", ".join(f"{key} = {json.dumps(text[key])[:40]}" for key in keys if key in text)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, of a model that also reads images."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def untied(config: dict[str, Any]) -> dict[str, Any]:
    """A config that says that the output head does not share the embedding."""
    said = config | {"tie_word_embeddings": False}
    inner = config.get("text_config")
    return said | {"text_config": untied(inner)} if isinstance(inner, dict) else said


def without_own_keys(config: Any) -> Any:
    """A config without the keys that are not a file's to decide, at any depth."""
    if not isinstance(config, dict) or _non_finite(config) is not None:
        return config
    return {
        key: without_own_keys(value)
        for key, value in config.items()
        if key not in OWN_KEYS and not key.startswith("_")  # guard: config-says-no-loading
    }


def with_floats(config: Any) -> Any:
    """A config with floats in the place of `{"__float__": "Infinity"}` and the like, at any depth."""
    if isinstance(config, list):
        return [with_floats(value) for value in config]
    if not isinstance(config, dict):
        return config
    found = _non_finite(config)
    return {key: with_floats(value) for key, value in config.items()} if found is None else found


def _non_finite(value: dict[str, Any]) -> float | None:
    tag = value.get("__float__")
    return _NON_FINITE.get(tag) if len(value) == 1 and isinstance(tag, str) else None


def _number(text: dict[str, Any], name: str, path: Path) -> tuple[int, str]:
    """A number, and the key that has it."""
    for key in _NAMES[name]:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value, key
    for key in _NAMES[name]:
        if key in text:
            raise bad_value(path, key, text[key], ["int"])
    raise StateError(
        f"{path} does not say {_NAMES[name][0]}, without which shoal cannot reckon what a model takes: architectures that "
        "have no such key, such as bloom, gpt_neo and mamba, are not supported. If this one has it, transformers writes it "
        "when it saves the model again"
    )

"""What everything but the model itself must know of a policy that `transformers` computes, read from its JSON files.

Called by the renderer, the engine for such policies and the limits of memory. Light: it imports neither torch nor
transformers, so it knows no defaults of an architecture: what `config.json` leaves out cannot be known here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import StateError
from shoal.policy.spec import LARGEST, read_capped, turn_ends_of
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

_LEARNS_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "biogpt"})
"""Architectures with a table of learned numbers for each position. No key of their configs says so."""

OWN_KEYS = frozenset({
    "attn_implementation", "experts_implementation", "auto_map", "dtype", "torch_dtype", "name_or_path", "fusion_config",
    "distributed_config", "transformers_weights", "quantization_config", "output_attentions", "output_hidden_states",
    "num_labels", "id2label", "label2id",
})  # fmt: skip
"""Keys of a `config.json` that say how and from where to load, which a file may not decide; nor any that begins with _.
And the labels of a classifier: a language model has none, and transformers makes a name for each of any number."""


@dataclass(frozen=True)
class AnySpec:
    """A policy of any architecture: what it reads and writes, and numbers from which its memory is estimated."""

    architecture: str
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
    """Of all tensors in its files; 0 if there are none or nobody has looked."""

    @property
    def parameters(self) -> int:
        """All weights: those of the files, or what a usual model of this shape has at most."""
        if self.stored_values:
            return self.stored_values
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        experts = max(1, self.experts) * 3 * self.width * self.mlp_width + self.experts * self.width
        rows = (2 - self.tied) * self.vocab_size + (self.max_positions if self.architecture in _LEARNS_POSITIONS else 0)
        return self.layers * (attention + experts + 8 * self.width) + rows * self.width

    @staticmethod
    def from_directory(directory: Path) -> "AnySpec":
        """Read the JSON files. Raises `StateError` if they do not describe a language model that we can run."""
        config = read_config(directory)
        path, text = Path(directory) / "config.json", text_config(config)
        architecture = config.get("model_type")
        if not isinstance(architecture, str) or not architecture:
            raise StateError(f"{path} is not a model's config: it has no model_type. Copy or download the model again")
        numbers = {name: _number(text, name, path) for name in _NAMES}
        kv_heads = text.get("num_key_value_heads")
        head_dim = text.get("head_dim")
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        eos_ids = tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int))
        experts = [count for key in _EXPERTS if isinstance(count := text.get(key), int)]
        widths = [width for key in _WIDTHS if isinstance(width := text.get(key), int) and not isinstance(width, bool)]
        turn_ends = turn_ends_of(Path(directory) / "generation_config.json")
        spec = AnySpec(
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
        ids = (*spec.eos_ids, *spec.turn_ends)
        demands = [
            (config.get("is_encoder_decoder") in (None, False), "it has an encoder; only plain language models are known"),
            (not config.get("quantization_config"), "the weights are quantised; use the full-precision model"),
            (spec.layers <= MAX_TENSORS, f"layers = {spec.layers}: more than MAX_TENSORS = {MAX_TENSORS}"),
            *(
                (0 < value <= LARGEST, f"{name} = {value}: not in 1..{LARGEST}")
                for name in (*numbers, "kv_heads", "head_dim", "mlp_width")
                for value in [getattr(spec, name)]
            ),
            (all(0 <= i < spec.vocab_size for i in ids), f"end tokens {ids} exceed vocab_size = {spec.vocab_size}"),
        ]  # fmt: skip
        for holds, fault in demands:
            if not holds:
                raise StateError(f"{path}: {fault}. Choose another model, or fix the file")
        return spec


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a directory as it is. Raises `StateError` if it is no JSON object."""
    path = Path(directory) / "config.json"
    try:
        return msgspec.json.decode(read_capped(path, MAX_JSON_BYTES), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{path} is not a model's config: {error}. Copy or download the model again") from None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, of a model that also reads images."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def without_own_keys(config: Any) -> Any:
    """A config without the keys that are not a file's to decide, at any depth."""
    if not isinstance(config, dict):
        return config
    return {
        key: without_own_keys(value)
        for key, value in config.items()
        if key not in OWN_KEYS and not key.startswith("_")  # guard: config-says-no-loading
    }


def _number(text: dict[str, Any], name: str, path: Path) -> int:
    for key in _NAMES[name]:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise StateError(
        f"{path} does not say {_NAMES[name][0]}. Open the model with transformers and save it again, which writes all keys"
    )

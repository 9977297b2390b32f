"""The shape of a policy: reads a HuggingFace `config.json` strictly, and writes it.

Light: it imports no torch, and of weights it reads at most the embedding and the head, if both are stored though the config
says that they are one. It knows four architectures, which differ in two switches: Llama and Mistral (neither), Qwen2 (bias
on q, k, v), Qwen3 (a norm on each head's query and key).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import StateError
from shoal.models.config import (
    EMBEDDING,
    HEAD,
    LARGEST,
    NO_CONFIG,
    TARGETS,
    Feature,
    ids_of,
    token_id_fault,
    turn_ends_of,
)
from shoal.models.rope import KINDS, NEEDED, RopeScaling, scaling_of
from shoal.models.safetensors_header import decode_strictly, differ_in_files, read_capped
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_TENSORS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The family, as in the run file and in `model_type`, and the class name that `transformers` looks for."""

AUTO_REMEDY = 'Choose another model, or set policy.implementation = "auto", which takes what transformers computes'
"""What to do about a model that our own code does not compute."""


class UnsupportedModel(StateError):
    """A model that our own code does not compute."""

    def __init__(self, cause: str, remedy: str = AUTO_REMEDY) -> None:
        super().__init__(f"{cause}. {remedy}")
        self.cause = cause


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder-only transformer, and its special token ids: a `ModelConfig`."""

    family: str
    """llama, mistral, qwen2 or qwen3."""
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    """Longest sequence, in tokens."""
    rope_theta: float
    norm_eps: float
    tied: bool
    """The output head shares the embedding: the config says so, and the files hold no head of other values."""
    eos_ids: tuple[int, ...]
    """Tokens that end a text. The first is the main one."""
    pad_id: int | None = None
    """The token whose embedding learns nothing as an input, as in `transformers`. Below 0 it counts from the last one."""
    bos_id: int | None = None
    rope_scaling: RopeScaling | None = None
    """How the rotation is scaled for longer texts; None for the plain one."""
    turn_ends: tuple[int, ...] = ()
    """Tokens that end a turn, as `generation_config.json` names them; empty if that is missing or names `eos_ids`."""

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key pass through a norm."""
        return self.family == "qwen3"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor in a checkpoint of this policy."""
        D, E = self.width, self.head_dim
        queries, keys = self.heads * E, self.kv_heads * E
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (queries, D),
            "self_attn.k_proj.weight": (keys, D),
            "self_attn.v_proj.weight": (keys, D),
            "self_attn.o_proj.weight": (D, queries),
            "post_attention_layernorm.weight": (D,),
            "mlp.gate_proj.weight": (self.mlp_width, D),
            "mlp.up_proj.weight": (self.mlp_width, D),
            "mlp.down_proj.weight": (D, self.mlp_width),
        }
        if self.qkv_bias:
            layer |= {
                f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", queries), ("k", keys), ("v", keys))
            }
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (E,), "self_attn.k_norm.weight": (E,)}
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, D),
            "model.norm.weight": (D,),
        }
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes if self.tied else shapes | {HEAD: (self.vocab_size, D)}

    def layer_matrices(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.tensor_shapes().items() if name.endswith("_proj.weight")}

    def supports(self, feature: Feature) -> bool:
        return True

    def num_parameters(self) -> int:
        return sum(map(math.prod, self.tensor_shapes().values()))

    def layer_parameters(self) -> int:
        ends = self.width * (1 + self.vocab_size * (1 if self.tied else 2))
        return (self.num_parameters() - ends) // self.layers

    def adapter_parameters(self, rank: int, targets: Sequence[str] = TARGETS) -> int:
        return rank * sum(sum(shape) for name, shape in self.layer_matrices().items() if name.split(".")[-2] in targets)

    def largest_tensor(self) -> int:
        return max(map(math.prod, self.tensor_shapes().values()))

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes

    def layer_activations(self) -> int:
        """The two normed inputs; query, key and value; queries and keys turned, and before that normed;
        queries apart from the keys that they share; what attention reads; gate and up; their product."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (queries + 2 * keys) + (1 + self.qk_norm) * (queries + keys) + queries
        if self.heads > self.kv_heads:
            attention += queries
        return 2 * self.width + attention + 3 * self.mlp_width

    def forward_activations(self) -> int:
        """The residual, queries with keys and values, the MLP."""
        return 4 * self.width + 6 * (self.heads + 2 * self.kv_heads) * self.head_dim + 4 * self.mlp_width

    def arranged_values(self) -> int:
        """Each matrix behind a norm, before and after it is multiplied by the norm's weight."""
        return 2 * self.width * ((self.heads + 2 * self.kv_heads) * self.head_dim + 2 * self.mlp_width)

    @staticmethod
    def from_directory(directory: Path) -> "TransformerConfig":
        """Read `config.json`. Raises `StateError` if it is missing, malformed or not a policy that we can run.

        As in `transformers`, a head that is stored with other values than the embedding is a head of its own, whatever
        the config says.
        """
        path = Path(directory) / "config.json"
        data = read_capped(path, MAX_JSON_BYTES)
        family = decode_strictly(data, _Family, path, NO_CONFIG).model_type
        if family not in ARCHITECTURES:  # which has other keys, and lacks some of ours
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModel(f"{path}: model_type is {family[:40]!r}; known: {known}")
        config = decode_strictly(data, _HfConfig, path, NO_CONFIG)
        spec = _from_hf(config, turn_ends_of(Path(directory) / "generation_config.json", config.vocab_size), path)
        if spec.tied:
            return replace(spec, tied=not differ_in_files(Path(directory), EMBEDDING, HEAD))
        return spec

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` with which `transformers` opens this policy."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_width,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_parameters": self._rope_to_hf(),
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids),
            "pad_token_id": self.pad_id,
            "bos_token_id": self.bos_id,
        }
        if self.family == "llama":
            config |= {"attention_bias": False, "mlp_bias": False}
        elif self.family == "mistral":
            config |= {"sliding_window": None}
        else:
            config |= {"use_sliding_window": False}
        if self.family == "qwen3":
            config |= {"attention_bias": False}
        if self.rope_scaling is not None:  # programs older than transformers 5 read it here
            config |= {"rope_scaling": self._rope_to_hf()}
        return config

    def generation_to_hf(self) -> dict[str, Any]:
        """The `generation_config.json` beside it, if the model that it began from has none."""
        config = self.to_hf() | ({"eos_token_id": list(self.turn_ends)} if self.turn_ends else {})
        if (self.pad_id or 0) < 0:  # no token to pad with
            config["pad_token_id"] = None
        return {"do_sample": True, "temperature": 1.0} | {
            key: config[key] for key in ("eos_token_id", "pad_token_id", "bos_token_id") if config[key] is not None
        }

    def _rope_to_hf(self) -> dict[str, Any]:
        kind = self.rope_scaling.kind if self.rope_scaling else "default"
        scaling = self.rope_scaling.to_hf() if self.rope_scaling else {}
        return {"rope_type": kind, "rope_theta": self.rope_theta} | scaling


class _Family(msgspec.Struct):
    """The key of a `config.json` that decides which other keys there are."""

    model_type: str


class _HfConfig(msgspec.Struct):
    """The keys of a `config.json` that decide what the model computes. Other keys are ignored."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    rope_theta: float | None = 10000.0
    """`transformers` takes null for no number, and cannot run the model."""
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = -1
    """A Mistral without this key has one."""
    layer_types: list[str] | None = None
    is_causal: Any = True
    per_layer_config: Any = None
    text_config: Any = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None


def _rope_of(config: _HfConfig) -> tuple[dict[str, Any], object, object]:
    """What describes the rotation, in the order of transformers 5: the keys, `rope_theta` and the type."""
    rope = config.rope_scaling or config.rope_parameters or {}
    return rope, rope.get("rope_theta", config.rope_theta), rope.get("rope_type", rope.get("type", "default"))


def _from_hf(config: _HfConfig, turn_ends: tuple[int, ...], path: Path) -> TransformerConfig:
    rope, theta, kind = _rope_of(config)
    scaling = _scaling(kind, rope, config, path)
    heads = config.num_attention_heads
    eos_ids = ids_of(config.eos_token_id)
    spec = TransformerConfig(
        family=config.model_type,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or (config.hidden_size // heads if heads > 0 else 0),
        mlp_width=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rope_theta=float(theta) if isinstance(theta, int | float) else 0.0,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        eos_ids=eos_ids,
        pad_id=config.pad_token_id,
        bos_id=config.bos_token_id,
        rope_scaling=scaling,
        turn_ends=() if set(turn_ends) == set(eos_ids) else turn_ends,
    )
    for holds, fault in _foreign(config):
        if not holds:
            raise UnsupportedModel(f"{path}: {fault}")
    for holds, fault in _demands(config, spec, scaling):
        if not holds:
            raise StateError(f"{path}: {fault}. Choose another model, or fix the file")
    return spec


def _foreign(config: _HfConfig) -> list[tuple[bool, str]]:
    """What must hold of a config for our own code to compute its model, each with what is said if it does not."""
    rope, _, kind = _rope_of(config)
    return [
        (config.hidden_act == "silu", f"hidden_act is {config.hidden_act!r}; only silu is known"),
        (
            not any(isinstance(value, dict) for value in rope.values()),
            "its rope_parameters are nested by layer type; only one rotation for all layers is known",
        ),
        (kind in KINDS, f"rope_type is {kind!r}; known: {', '.join(KINDS)}"),
        (
            rope.get("partial_rotary_factor", config.partial_rotary_factor) in (None, 1),
            "partial_rotary_factor is not 1: only whole heads are rotated",
        ),
        (not (config.attention_bias or config.mlp_bias), "attention_bias or mlp_bias is set; not supported"),
        (
            not config.use_sliding_window
            and (config.model_type != "mistral" or config.sliding_window is None)
            and all(kind == "full_attention" for kind in config.layer_types or ()),
            "it has sliding windows; only full attention is known",
        ),
    ]


def _demands(config: _HfConfig, spec: TransformerConfig, scaling: RopeScaling | None) -> list[tuple[bool, str]]:
    """What must hold of a checkpoint's config, each with what is said if it does not, in the file's own keys."""
    rope, theta, kind = _rope_of(config)
    rope_key = "rope_scaling" if config.rope_scaling else "rope_parameters"
    heads, head_dim = spec.heads, "head_dim" if config.head_dim else "hidden_size / num_attention_heads"
    bounded = {
        "hidden_size": spec.width, "num_hidden_layers": spec.layers, "num_attention_heads": heads,
        "num_key_value_heads": spec.kv_heads, head_dim: spec.head_dim, "intermediate_size": spec.mlp_width,
        "vocab_size": spec.vocab_size, "max_position_embeddings": spec.max_positions,
    }  # fmt: skip
    special = {
        "eos_token_id": spec.eos_ids, "bos_token_id": ids_of(spec.bos_id),
    }  # fmt: skip
    return [
        *(
            (rope.get(key) is not None, f"{rope_key} gives no {key}, which rope_type {kind} needs")
            for key in (NEEDED.get(scaling.kind, ()) if scaling else ())
        ),
        *(scaling.demands() if scaling else ()),
        (
            config.is_causal,
            f"is_causal is {config.is_causal!r}: tokens would see later ones, so no choice could be replayed",
        ),
        (not config.per_layer_config, "per_layer_config gives layers numbers of their own; not supported"),
        (config.text_config is None, "text_config describes another model within; not supported"),
        (
            len(config.layer_types or ()) in (0, spec.layers),
            f"layer_types names {len(config.layer_types or ())} layers of {spec.layers}",
        ),
        (config.quantization_config is None, "the weights are quantised; use the full-precision model"),
        (
            spec.layers <= MAX_TENSORS // 12,
            f"num_hidden_layers = {spec.layers}: more than MAX_TENSORS = {MAX_TENSORS} allow",
        ),
        *((0 < n <= LARGEST, f"{key} = {n}: not in 1..{LARGEST}") for key, n in bounded.items()),
        (
            spec.kv_heads > 0 and heads % spec.kv_heads == 0,
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {spec.kv_heads}",
        ),
        (spec.head_dim % 2 == 0, f"{head_dim} = {spec.head_dim}: must be even"),
        (1.0 <= spec.rope_theta < 1e12, f"rope_theta = {theta!r}: must be at least 1 and below 1e12"),
        (scaling is None or spec.rope_theta > 1.0, "rope_theta is 1, which cannot be scaled"),
        (0.0 < spec.norm_eps < 1.0, f"rms_norm_eps = {spec.norm_eps}: must be above 0 and below 1"),
        *(
            (not (fault := token_id_fault(ids, spec.vocab_size)), f"{key} = {[*ids]}: {fault}")
            for key, ids in special.items()
        ),
        (
            -spec.vocab_size <= (spec.pad_id or 0) < spec.vocab_size,
            f"pad_token_id = {spec.pad_id}: not in {-spec.vocab_size}..{spec.vocab_size - 1}",
        ),
    ]


def _scaling(kind: object, rope: dict[str, Any], config: _HfConfig, path: Path) -> RopeScaling | None:
    """The rotation's scaling; None also for a kind that we do not know, which `_from_hf` refuses."""
    if kind not in KINDS:
        return None
    try:
        original = config.original_max_position_embeddings
        return scaling_of(str(kind), rope, config.max_position_embeddings, original)
    except msgspec.ValidationError as error:
        raise StateError(f"{path}: its rope parameters are malformed: {error}. Download the model again") from None

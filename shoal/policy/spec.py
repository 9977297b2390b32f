"""The shape of a policy: reads a HuggingFace `config.json` strictly, and writes it.

Called by the model, the loader, the renderer and the engine. Light: it imports no torch and reads no weights. It knows
four architectures, which differ in two switches: Llama and Mistral (neither), Qwen2 (bias on q, k, v), Qwen3 (a norm
on each head's query and key).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import StateError, cause_of
from shoal.policy.rope import KINDS, RopeScaling, scaling_of
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_TENSORS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The family, as in the run file and in `model_type`, and the class name that `transformers` looks for."""

LARGEST = 1 << 24
"""Upper limit for each number of a policy's shape."""


@dataclass(frozen=True)
class PolicySpec:
    """The shape of a decoder-only transformer, and its special token ids."""

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
    """The output head shares the embedding."""
    eos_ids: tuple[int, ...]
    """Tokens that end a text. The first is the main one."""
    pad_id: int | None = None
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
            "model.embed_tokens.weight": (self.vocab_size, D),
            "model.norm.weight": (D,),
        }
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocab_size, D)}

    @staticmethod
    def from_directory(directory: Path) -> "PolicySpec":
        """Read `config.json`. Raises `StateError` if it is missing, malformed or not a policy that we can run."""
        path = Path(directory) / "config.json"
        data = read_capped(path, MAX_JSON_BYTES)
        try:
            family = msgspec.json.decode(data, type=_Family).model_type
            if family not in ARCHITECTURES:  # which has other keys, and lacks some of ours
                known = ", ".join(ARCHITECTURES)
                raise StateError(
                    f"{path}: model_type is {family[:40]!r}; known: {known}. Choose another model, "
                    'or set policy.implementation = "auto"'
                )
            config = msgspec.json.decode(data, type=_HfConfig)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StateError(f"{path} is not a model's config: {error}. Copy or download the model again") from None
        return _from_hf(config, turn_ends_of(Path(directory) / "generation_config.json"), path)

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
        """The `generation_config.json` beside it."""
        config = self.to_hf() | ({"eos_token_id": list(self.turn_ends)} if self.turn_ends else {})
        return {"do_sample": True, "temperature": 1.0} | {
            key: config[key] for key in ("eos_token_id", "pad_token_id", "bos_token_id") if config[key] is not None
        }

    def _rope_to_hf(self) -> dict[str, Any]:
        kind = self.rope_scaling.kind if self.rope_scaling else "default"
        scaling = self.rope_scaling.to_hf() if self.rope_scaling else {}
        return {"rope_type": kind, "rope_theta": self.rope_theta} | scaling


def read_capped(path: Path, limit_bytes: int) -> bytes:
    """Read a small file of a checkpoint. Raises `StateError` if it cannot be read or is larger than `limit_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. {path.parent} must be a model's directory") from None
    if len(data) > limit_bytes:
        raise StateError(f"{path} is larger than {limit_bytes} bytes: too large for a model's file of this name")
    return data


def write_json(path: Path, value: Any) -> None:
    """Write a small file of a checkpoint, readable and always with the same bytes."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


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
    rope_theta: float | None = None
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
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None


class _Generation(msgspec.Struct):
    """The key of a `generation_config.json` that decides where a turn ends. Other keys are ignored."""

    eos_token_id: int | list[int] | None = None


def turn_ends_of(path: Path) -> tuple[int, ...]:
    """The end tokens of a `generation_config.json`; none if there is no such file."""
    if not path.exists():
        return ()
    try:
        found = msgspec.json.decode(read_capped(path, MAX_JSON_BYTES), type=_Generation).eos_token_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{path} is damaged: {error}. Copy or download the model again") from None
    return _ids(found)


def _ids(found: int | list[int] | None) -> tuple[int, ...]:
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def _from_hf(config: _HfConfig, turn_ends: tuple[int, ...], path: Path) -> PolicySpec:
    rope = config.rope_scaling or config.rope_parameters or {}  # in the order of transformers 5
    theta = rope.get("rope_theta", config.rope_theta if config.rope_theta is not None else 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = _scaling(kind, rope, config, path)
    heads = config.num_attention_heads
    eos_ids = _ids(config.eos_token_id)
    spec = PolicySpec(
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
        pad_id=None if config.pad_token_id is None or config.pad_token_id < 0 else config.pad_token_id,
        bos_id=config.bos_token_id,
        rope_scaling=scaling,
        turn_ends=() if set(turn_ends) == set(eos_ids) else turn_ends,
    )
    bounded = ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "vocab_size", "max_positions")
    ids = (*spec.eos_ids, *spec.turn_ends, *(i for i in (spec.pad_id, spec.bos_id) if i is not None))
    demands = [
        (config.hidden_act == "silu", f"hidden_act is {config.hidden_act!r}; only silu is known"),
        (
            not any(isinstance(value, dict) for value in rope.values()),
            "its rope_parameters are nested by layer type; only one rotation for all layers is known",
        ),
        (kind in KINDS, f"rope_type is {kind!r}; known: {', '.join(KINDS)}"),
        *(scaling.demands() if scaling else ()),
        (
            rope.get("partial_rotary_factor", config.partial_rotary_factor) in (None, 1),
            "partial_rotary_factor is not 1: only whole heads are rotated",
        ),
        (not (config.attention_bias or config.mlp_bias), "attention_bias or mlp_bias is set; not supported"),
        (config.quantization_config is None, "the weights are quantised; use the full-precision model"),
        (
            not config.use_sliding_window
            and (config.model_type != "mistral" or config.sliding_window is None)
            and all(kind == "full_attention" for kind in config.layer_types or ()),
            "it uses sliding-window attention; not supported",
        ),
        (spec.layers <= MAX_TENSORS // 12, f"layers = {spec.layers}: more than MAX_TENSORS = {MAX_TENSORS} allow"),
        *((0 < getattr(spec, n) <= LARGEST, f"{n} = {getattr(spec, n)}: not in 1..{LARGEST}") for n in bounded),
        (spec.kv_heads > 0 and heads % spec.kv_heads == 0, f"{heads} heads do not share {spec.kv_heads} kv_heads"),
        (spec.head_dim % 2 == 0, f"head_dim = {spec.head_dim}: must be even"),
        (1.0 <= spec.rope_theta < 1e12, f"rope_theta = {theta!r}: not in 1..1e12"),
        (scaling is None or spec.rope_theta > 1.0, "rope_theta is 1, which cannot be scaled"),
        (0.0 < spec.norm_eps < 1.0, f"rms_norm_eps = {spec.norm_eps}: not in 0..1"),
        (all(0 <= i < spec.vocab_size for i in ids), f"special token ids {ids} exceed vocab_size = {spec.vocab_size}"),
    ]
    for holds, fault in demands:
        if not holds:
            raise StateError(f"{path}: {fault}. Choose another model, or fix the file")
    return spec


def _scaling(kind: object, rope: dict[str, Any], config: _HfConfig, path: Path) -> RopeScaling | None:
    """The rotation's scaling; None also for a kind that we do not know, which `_from_hf` refuses."""
    if kind not in KINDS:
        return None
    try:
        original = config.original_max_position_embeddings
        return scaling_of(str(kind), rope, config.max_position_embeddings, original)
    except msgspec.ValidationError as error:
        raise StateError(f"{path}: its rope parameters are malformed: {error}. Download the model again") from None

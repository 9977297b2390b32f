"""What everything but the model itself knows of a policy: its config as a protocol, and what both kinds of config share.

Light: no torch. `transformer_config` has the config of the models that shoal computes, `hf_config` that of all others.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from shoal.errors import StateError
from shoal.models.safetensors_header import decode_strictly, read_capped
from shoal.protocol.constants import MAX_JSON_BYTES

LARGEST = 1 << 24
"""Upper limit for each number of a policy's shape."""

NO_CONFIG = "is not a model's config"
"""The fault of a `config.json` that is none."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, which an adapter may change."""

Feature = Literal["adapters", "nf4"]
"""What shoal computes for some models only."""


class ModelConfig(Protocol):
    """The config of a policy: what it reads and writes, and the numbers from which its memory is reckoned. Those of an
    architecture that only transformers knows are estimates from above."""

    @property
    def family(self) -> str:
        """`model_type`, by which transformers knows the architecture."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_positions(self) -> int:
        """Longest sequence, in tokens."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text. The first is the main one."""

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Tokens that end a turn, if they are others than `eos_ids`; else empty."""

    @property
    def width(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def mlp_width(self) -> int: ...

    @property
    def tied(self) -> bool:
        """The output head shares the embedding."""

    def supports(self, feature: Feature) -> bool:
        """Whether shoal computes this for the model."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor in a checkpoint; empty if only transformers knows them."""

    def layer_matrices(self) -> Mapping[str, tuple[int, ...]]:
        """Those of `tensor_shapes` that are matrices of layers: what adapters change, and NF4 codes."""

    def num_parameters(self) -> int:
        """All weights."""

    def layer_parameters(self) -> int:
        """The weights of one layer."""

    def adapter_parameters(self, rank: int, targets: Sequence[str] = TARGETS) -> int:
        """The weights of a low-rank adapter (arXiv:2106.09685) of these matrices in every layer."""

    def largest_tensor(self) -> int:
        """Values of the largest tensor."""

    def kv_bytes_per_token(self, item_bytes: int) -> int:
        """Keys and values that a cache holds of one token, of so many bytes each."""

    def layer_activations(self) -> int:
        """Numbers that one layer makes of one token and that its backward pass needs."""

    def forward_activations(self) -> int:
        """Numbers that one layer makes of one token without gradients, at most, with the copies between them."""

    def arranged_values(self) -> int:
        """Numbers of one layer's weights in the copies that a pass with gradients makes."""


def write_json(path: Path, value: Any) -> None:
    """Write a small file of a checkpoint, readable and always with the same bytes."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


class _Generation(msgspec.Struct):
    """The key of a `generation_config.json` that decides where a turn ends. Other keys are ignored."""

    eos_token_id: int | list[int] | None = None


def turn_ends_of(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The end tokens of a `generation_config.json`; none if there is no such file. Raises `StateError`."""
    if not path.exists():
        return ()
    ids = ids_of(decode_strictly(read_capped(path, MAX_JSON_BYTES), _Generation, path).eos_token_id)
    if fault := token_id_fault(ids, vocab_size):
        raise StateError(f"{path}: eos_token_id = {[*ids]}: {fault}. Choose another model, or fix the file")
    return ids


def merged_generation_config(path: Path, ends: int | list[int] | None) -> bytes:
    """A `generation_config.json` as it is, but for end tokens: if it names others than `ends`, those take their place.
    Raises `StateError`."""
    data = read_capped(path, MAX_JSON_BYTES)
    if ids_of(decode_strictly(data, _Generation, path).eos_token_id) == ids_of(ends):
        return data
    values = decode_strictly(data, dict[str, msgspec.Raw], path)
    values["eos_token_id"] = msgspec.Raw(msgspec.json.encode(ends))
    lines = (b"  %b: %b" % (msgspec.json.encode(key), bytes(value)) for key, value in values.items())
    return b"{\n%b\n}\n" % b",\n".join(lines)


def token_id_fault(ids: tuple[int, ...], vocab_size: int) -> str:
    """What is wrong with ids of tokens; empty if each is below the size of the vocabulary."""
    if any(i < 0 for i in ids):
        return "an id is below 0; leave the key out if there is no such token"
    return f"not below vocab_size = {vocab_size}" if any(i >= vocab_size for i in ids) else ""


def ids_of(found: int | list[int] | None) -> tuple[int, ...]:
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)

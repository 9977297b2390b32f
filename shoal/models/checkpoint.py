"""Checkpoints on disk: reads HuggingFace directories as if strangers wrote them, and writes them whole or not at all.

It never unpickles: `stored` reads safetensors files.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import StateError, cause_of, remedy_of
from shoal.models import lora_config
from shoal.models.config import HEAD, ModelConfig, merged_generation_config, write_json
from shoal.models.hf_config import read_config
from shoal.models.load_tensors import demand_floats, demand_same_shapes, fill_all, without_scales
from shoal.models.nf4_layout import demand_coded, has_codes, is_coded
from shoal.models.safetensors_header import StoredTensor, find_whole, read_header
from shoal.models.transformer_config import TransformerConfig
from shoal.run_folder import replaced_folder

if TYPE_CHECKING:
    import torch

    from shoal.models.interface import PolicyModel
    from shoal.models.transformer import Transformer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip

TOKENIZER_KEYS = ("tokenizer_class", "transformers_version")
"""Keys of a `config.json` that decide tokens, besides its `model_type`."""

SHARD_BYTES = 5_000_000_000
"""Weights of more bytes are written as several files of at most as many, unless one tensor alone has more."""

_READ_BYTES = 8 << 20


def load_policy(directory: Path, dtype: "torch.dtype | None" = None) -> "Transformer":
    """Load a checkpoint directory as a model of `dtype` (default float32), ready to run, with the adapter beside it if any.

    Raises `StateError` if a file is missing, damaged or hostile, if the tensors do not match its config, or if a weight is
    not a finite number. What is stored as int8 is turned into numbers, see `int8`; what is stored as NF4 stays so, see
    `frozen`.
    """
    import torch

    from shoal.models.int8 import multiply
    from shoal.models.nf4_checkpoint import load_coded
    from shoal.models.transformer import Transformer

    spec = TransformerConfig.from_directory(directory)
    stored = _needed(find_tensors(directory), spec)
    if has_codes(stored):
        model = load_coded(spec, stored, directory, dtype or torch.float32)
    else:
        stored, scales = _without_scales(stored, spec, directory)
        model = Transformer(spec, dtype or torch.float32)
        parameters = dict(model.named_parameters())
        fill_all(parameters, stored, directory)
        scale_tensors = {name: torch.empty(one.shape) for name, one in scales.items()}
        fill_all(scale_tensors, scales, directory)
        multiply(parameters, scale_tensors, directory)
    if lora_config.has_adapter(directory):
        from shoal.models.lora import load_adapter

        load_adapter(model, directory)
    return model


def policy_tensors(directory: Path) -> tuple[TransformerConfig, dict[str, StoredTensor]]:
    """What a checkpoint directory says of its policy, and where its tensors are by the names of `Transformer`.

    Raises `StateError` if a file is damaged or hostile, if the tensors do not match the config, or if they are codes.
    """
    spec = TransformerConfig.from_directory(directory)
    stored = _needed(find_tensors(directory), spec)
    if has_codes(stored):  # guard: nf4-only-where-read
        raise StateError(
            f"{directory}: its layers are in NF4, which only shoal's own engine and trainer read: use the model in full "
            "precision, or join without --engine"
        )
    stored, _ = _without_scales(stored, spec, directory)
    demand_floats(stored, directory)
    return spec, stored


def _without_scales(
    stored: dict[str, StoredTensor], spec: ModelConfig, directory: Path
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """As `without_scales`, of tensors that match the config. Raises `StateError` for others."""
    stored, scales = without_scales(stored, directory)
    demand_same_shapes(stored, spec.tensor_shapes(), directory)  # before a hostile config makes us allocate too much
    return stored, scales


def demand_weights(directory: Path, spec: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint directory, after the checks of loading that need no values, and no torch. Raises
    `StateError`. Of another architecture, only transformers knows the names."""
    stored = find_tensors(directory)
    if not spec.tensor_shapes():
        demand_floats(stored, directory)
        return stored
    stored = _needed(stored, spec)
    if has_codes(stored):
        demand_coded(stored, spec, directory)
    else:
        _without_scales(stored, spec, directory)
    return stored


def write_nf4(source: Path, target: Path) -> None:
    """Write the model in `source` to the directory `target`, which may be the same, with its layers in NF4. Raises
    `StateError` as `nf4_checkpoint.write_coded`."""
    from shoal.models.nf4_checkpoint import write_coded

    write_coded(source, policy_tensors(source)[1], target, SHARD_BYTES)


def load_int8(directory: Path) -> "Transformer":
    """The policy of a directory as int8 actors sample it, in float32. Raises `StateError` as `load_policy`."""
    from shoal.models.int8 import round_to_int8

    if is_coded(directory):  # guard: codes-are-not-rounded
        raise StateError(f"{directory}: its layers are in NF4 already: sample in float32 or bfloat16")
    model = load_policy(directory)
    if not any(stored.dtype == "I8" for stored in find_tensors(directory).values()):  # guard: never-rounded-twice
        round_to_int8(model)
    return model


def read_tensors(directory: Path, dtype: "torch.dtype") -> "dict[str, torch.Tensor]":
    """Every tensor of a checkpoint directory in `dtype`, in memory of its own. Raises `StateError` as `load_policy`."""
    import torch

    stored = find_tensors(directory)
    demand_floats(stored, directory)
    tensors = {name: torch.empty(one.shape, dtype=dtype) for name, one in stored.items()}
    fill_all(tensors, stored, directory)
    return tensors


@dataclass(frozen=True)
class WeightSnapshot:
    """A `Published` whose tensors are in its dtype (float32 for int8), and which a model no longer changes."""

    dtype: str
    tensors: "dict[str, torch.Tensor]"
    files: Mapping[str, Any]
    weights: str

    def whole(self, name: str, dtype: "torch.dtype") -> "torch.Tensor":
        """As of `Published`."""
        return self.tensors[name]


def snapshot(model: "PolicyModel", dtype: str) -> WeightSnapshot:
    """A copy of a model's weights for `save_policy` in `dtype`, so that it can be written while the model learns on.
    Those of an adapter are always float32."""
    from shoal.models.safetensors_writer import written_dtype

    published = model.published()
    target = written_dtype(_dtype_in(published.weights, dtype))
    tensors = {name: p.detach().to("cpu", target, copy=True) for name, p in published.tensors.items()}
    return WeightSnapshot(dtype, tensors, published.files, published.weights)


def save_policy(
    policy: "PolicyModel | WeightSnapshot",
    directory: Path,
    dtype: str,
    tokenizer_from: Path | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Write a checkpoint directory in `dtype` (float32, bfloat16 or int8), with the tokenizer files of another directory
    and, but for end tokens, its `generation_config.json`.

    The directory appears whole or not at all, if it is `durable` even if the machine dies. It replaces an older one of the
    same name. Raises `StateError` if writing fails, or if a file of the other directory is damaged.
    """
    from shoal.models.safetensors_writer import write_weights, written_dtype

    directory = Path(directory)
    is_of = isinstance(policy, WeightSnapshot) and written_dtype(policy.dtype) != written_dtype(dtype)
    assert not is_of, f"the snapshot is not for {dtype}"
    published = policy if isinstance(policy, WeightSnapshot) else policy.published()
    try:
        with replaced_folder(directory, durable=durable) as scratch:
            write_weights(published, scratch / published.weights, _dtype_in(published.weights, dtype), shard_bytes)
            for name, content in published.files.items():
                more = _tokenizer_keys(tokenizer_from) | {"dtype": dtype} if name == "config.json" else {}
                write_json(scratch / name, content | more)
            _keep_generation(published.files, scratch, tokenizer_from)
            for name in TOKENIZER_FILES:
                if tokenizer_from is not None and (Path(tokenizer_from) / name).exists():
                    shutil.copyfile(Path(tokenizer_from) / name, scratch / name)
    except OSError as error:
        raise StateError(
            f"cannot write checkpoint {directory}: {cause_of(error)}. {remedy_of(error)}, or choose another folder, "
            "then try again"
        ) from None


def _keep_generation(files: Mapping[str, Any], directory: Path, start: Path | None) -> None:
    """Write the `generation_config.json` of the model that a policy began from over the one among its files, if any."""
    name = "generation_config.json"
    if start is not None and name in files and (Path(start) / name).exists():
        (directory / name).write_bytes(merged_generation_config(Path(start) / name, files[name].get("eos_token_id")))


def _tokenizer_keys(directory: Path | None) -> dict[str, Any]:
    """What the `config.json` beside a tokenizer says of it."""
    config = read_config(directory) if directory is not None and (Path(directory) / "config.json").exists() else {}
    return {key: config[key] for key in TOKENIZER_KEYS if key in config}


def _dtype_in(weights: str, name: str) -> str:
    """Of the tensors in a file of weights, if the policy is published in this dtype."""
    return "float32" if weights == lora_config.WEIGHTS else name


def tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Map the name of every tensor, sorted, to (dtype as safetensors names it, shape, SHA-256 of the bytes in hex).

    The weights root is made from this. Raises `StateError` as `load_policy`.
    """
    return {name: (t.dtype, t.shape, _hash_range(t)) for name, t in sorted(find_tensors(directory).items())}


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from one file or from the shards that its index names, and those of the adapter beside
    them. Raises `StateError`."""
    adapter = Path(directory) / lora_config.WEIGHTS
    found = find_whole(directory)
    return found | read_header(adapter) if adapter.exists() else found


def _needed(stored: dict[str, StoredTensor], spec: ModelConfig) -> dict[str, StoredTensor]:
    """Leave out what some checkpoints store besides the weights: rotary tables, the copy of a tied head, an adapter."""
    return {
        name: tensor
        for name, tensor in stored.items()
        if tensor.file.name != lora_config.WEIGHTS
        and not name.endswith("rotary_emb.inv_freq")
        and not (spec.tied and name == HEAD)
    }


def _hash_range(stored: StoredTensor) -> str:
    h = hashlib.sha256()
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        left = stored.end - stored.start
        while left:
            data = file.read(min(left, _READ_BYTES))
            if not data:
                raise StateError(f"{stored.file} became shorter while it was read")
            h.update(data)
            left -= len(data)
    return h.hexdigest()

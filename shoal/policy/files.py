"""Checkpoints on disk: reads HuggingFace directories as if strangers wrote them, and writes them whole or not at all.

Called by the engine and the trainer (`load_policy`, `save_policy`), and by the weights room, which works without torch
(`tensors_of`); therefore torch is imported late. It knows the safetensors format and never unpickles.

A safetensors file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

import hashlib
import itertools
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import StateError, cause_of
from shoal.folder import replaced_folder
from shoal.policy.spec import PolicySpec, read_capped, write_json
from shoal.protocol.constants import MAX_SAFETENSORS_HEADER_BYTES, MAX_TENSORS

if TYPE_CHECKING:
    import torch

    from shoal.policy.base import PolicyModel
    from shoal.policy.model import Transformer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value of the dtypes that a policy may have, by safetensors' names."""

SHARD_BYTES = 5_000_000_000
"""Weights of more bytes are written as several files of at most as many, unless one tensor alone has more."""

MAX_INDEX_BYTES = 4 << 20
"""Size of the index of shards: enough for MAX_TENSORS tensors."""

_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: `start` and `end` are byte offsets from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def load_policy(directory: Path, dtype: "torch.dtype | None" = None) -> "Transformer":
    """Load a checkpoint directory as a model of `dtype` (default float32), ready to run.

    Raises `StateError` if a file is missing, damaged or hostile, if the tensors do not match its config, or if a weight is
    not a finite number.
    """
    import torch

    from shoal.policy.model import Transformer

    spec, stored = policy_tensors(directory)
    model = Transformer(spec, dtype or torch.float32)
    _fill_all(dict(model.named_parameters()), stored, directory)
    return model


def policy_tensors(directory: Path) -> tuple[PolicySpec, dict[str, StoredTensor]]:
    """What a checkpoint directory says of its policy, and where its tensors are by the names of `Transformer`.

    Raises `StateError` if a file is damaged or hostile, or if the tensors do not match the config.
    """
    spec = PolicySpec.from_directory(directory)
    stored = _needed(find_tensors(directory), spec)
    _demand_same_shapes(stored, spec.tensor_shapes(), directory)  # before a hostile config makes us allocate too much
    return spec, stored


def read_rows(stored: StoredTensor, begin: int, end: int, name: str) -> "torch.Tensor":
    """Some rows of a tensor in its file, as float32. Raises `StateError` as `load_policy`."""
    import torch

    row_bytes = (stored.end - stored.start) // stored.shape[0]
    first, last = (stored.start + place * row_bytes for place in (begin, end))
    rows = {name: torch.empty(end - begin, *stored.shape[1:])}
    part = StoredTensor(stored.file, stored.dtype, tuple(rows[name].shape), first, last)
    if begin < end:
        _fill_all(rows, {name: part}, stored.file.parent)
    return rows[name]


def read_tensors(directory: Path, dtype: "torch.dtype") -> "dict[str, torch.Tensor]":
    """Every tensor of a checkpoint directory in `dtype`, in memory of its own. Raises `StateError` as `load_policy`."""
    import torch

    stored = find_tensors(directory)
    tensors = {name: torch.empty(one.shape, dtype=dtype) for name, one in stored.items()}
    _fill_all(tensors, stored, directory)
    return tensors


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in its file: what safetensors calls its dtype, and its values as integers of the same bits."""

    dtype: str
    codes: NDArray[Any]


def map_policy(directory: Path, spec: PolicySpec) -> dict[str, MappedTensor]:
    """The tensors of a checkpoint directory by the names of `Transformer`, mapped into memory and not read.

    Raises `StateError` if a file is damaged or hostile, or if this is not a policy of this shape.
    """
    found, stored = policy_tensors(directory)
    if found != spec:
        raise StateError(f"{directory} holds a policy of another shape")
    maps = {file: np.asarray(np.memmap(file, np.uint8, "r")) for file in {one.file for one in stored.values()}}
    return {
        name: MappedTensor(
            one.dtype, maps[one.file][one.start : one.end].view(f"<i{ITEM_BYTES[one.dtype]}").reshape(one.shape)
        )
        for name, one in stored.items()
    }


@dataclass(frozen=True)
class Snapshot:
    """A `policy.base.Published` whose tensors are in its dtype, and which a model no longer changes."""

    dtype: str
    tensors: "dict[str, torch.Tensor]"
    files: Mapping[str, Any]
    weights: str

    def whole(self, name: str, dtype: "torch.dtype") -> "torch.Tensor":
        """As of `Published`."""
        return self.tensors[name]


def snapshot(model: "PolicyModel", dtype: str) -> Snapshot:
    """A copy of a model's weights in `dtype` (float32 or bfloat16), so that it can be written while the model learns on."""
    target, published = _torch_dtype(dtype), model.published()
    tensors = {name: p.detach().to("cpu", target, copy=True) for name, p in published.tensors.items()}
    return Snapshot(dtype, tensors, published.files, published.weights)


def save_policy(
    policy: "PolicyModel | Snapshot",
    directory: Path,
    dtype: str,
    tokenizer_from: Path | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    durable: bool = True,
) -> None:
    """Write a checkpoint directory in `dtype` (float32 or bfloat16), with the tokenizer files of another directory.

    The directory appears whole or not at all, if it is `durable` even if the machine dies. It replaces an older one of the
    same name. Raises `StateError` if writing fails.
    """
    from shoal.policy.stream import write_weights

    directory = Path(directory)
    assert not isinstance(policy, Snapshot) or policy.dtype == dtype, f"the snapshot is {policy.dtype}"
    published = policy if isinstance(policy, Snapshot) else policy.published()
    try:
        with replaced_folder(directory, durable=durable) as scratch:
            write_weights(published, scratch / published.weights, _torch_dtype(dtype), shard_bytes)
            for name, content in published.files.items():
                write_json(scratch / name, content | {"dtype": dtype} if name == "config.json" else content)
            for name in TOKENIZER_FILES:
                if tokenizer_from is not None and (Path(tokenizer_from) / name).exists():
                    shutil.copyfile(Path(tokenizer_from) / name, scratch / name)
    except OSError as error:
        raise StateError(
            f"cannot write checkpoint {directory}: {cause_of(error)}. Free space, or give another"
        ) from None


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Map the name of every tensor, sorted, to (dtype as safetensors names it, shape, SHA-256 of the bytes in hex).

    The weights root is made from this. Raises `StateError` as `load_policy`.
    """
    return {name: (t.dtype, t.shape, _hash_range(t)) for name, t in sorted(find_tensors(directory).items())}


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from one file or from the shards that its index names. Raises `StateError`."""
    directory = Path(directory)
    if (directory / WEIGHTS).exists() or not (directory / INDEX).exists():
        return read_header(directory / WEIGHTS)
    index = _decode(read_capped(directory / INDEX, MAX_INDEX_BYTES), _Index, directory / INDEX)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(index.weight_map.values())):
        # guard: names-of-shards
        if not shard.endswith(".safetensors") or Path(shard).name != shard or not shard.isprintable():
            raise StateError(f"{directory / INDEX} names {shard!r}: a shard is a .safetensors file beside it")
        found |= read_header(directory / shard)
    stray = {n for n, t in found.items() if index.weight_map.get(n) != t.file.name} | (index.weight_map.keys() - found)
    if stray:
        raise StateError(f"{directory / INDEX} and its shards disagree on {sorted(stray)[0]}: download the model again")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that they fill it exactly, without gaps or overlaps.

    Raises `StateError` if it is anything but a plain, whole file of floating-point tensors.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
                raise StateError(f"{path} is not a whole safetensors file: header of {length} in {size} bytes")
            header = _decode(file.read(length), dict[str, Any], path)
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. Is {path.parent} a model's directory?") from None
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise StateError(f"{path} holds {len(header)} tensors, limit MAX_TENSORS = {MAX_TENSORS}")
    data_start, expected = 8 + length, 0
    entries = {name: _entry(value, name, path) for name, value in header.items()}
    tensors: dict[str, StoredTensor] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        size_bytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if start != expected or end - start != size_bytes:
            raise StateError(f"{path}: bytes {start}..{end} of {name} do not hold {entry.dtype}{list(entry.shape)}")
        tensors[name] = StoredTensor(path, entry.dtype, entry.shape, data_start + start, data_start + end)
        expected = end
    if data_start + expected != size:
        raise StateError(f"{path} is {size} bytes, its tensors end at {data_start + expected}: download it again")
    return tensors


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _entry(value: Any, name: str, path: Path) -> _Entry:
    try:
        entry = msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise StateError(f"{path}: tensor {name} is malformed: {error}") from None
    if entry.dtype not in ITEM_BYTES:
        raise StateError(f"{path}: tensor {name} is {entry.dtype}; a policy's are one of {', '.join(ITEM_BYTES)}")
    if len(entry.shape) > 4 or any(not 0 < side < 1 << 32 for side in entry.shape):
        raise StateError(f"{path}: tensor {name} has shape {list(entry.shape)}, which no policy has")
    return entry


def _decode(data: bytes, kind: Any, path: Path) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{path} is damaged: {error}. Download the model again") from None


def _needed(stored: dict[str, StoredTensor], spec: PolicySpec) -> dict[str, StoredTensor]:
    """Leave out what some checkpoints store besides the weights: rotary tables, and the copy of a tied head."""
    return {
        name: tensor
        for name, tensor in stored.items()
        if not name.endswith("rotary_emb.inv_freq") and not (spec.tied and name == "lm_head.weight")
    }


def _demand_same_shapes(stored: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], directory: Path) -> None:
    for name in sorted(stored.keys() ^ shapes.keys()):
        fault = "lacks tensor" if name in shapes else "has a tensor that its config does not explain,"
        raise StateError(f"{directory} {fault} {name}: config.json and weights are from different models")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise StateError(f"{directory}: {name} is {list(stored[name].shape)}, config.json asks for {list(shape)}")


def _stored_dtype(stored: StoredTensor) -> "torch.dtype":
    import torch

    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored.dtype]


def _fill_all(tensors: "Mapping[str, torch.Tensor]", stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Read tensors from the files of a directory, each of which is opened once."""
    import torch

    in_order = sorted(stored.items(), key=lambda item: (item[1].file, item[1].start))
    with torch.no_grad():
        for path, parts in itertools.groupby(in_order, lambda item: item[1].file):
            with path.open("rb", buffering=0) as file:
                for name, one in parts:
                    _fill(tensors[name], one, file)
                    _demand_finite(tensors[name], name, directory)


def _fill(parameter: "torch.Tensor", stored: StoredTensor, file: RawIOBase) -> None:
    """Read a tensor from its open file into a parameter."""
    import torch

    if parameter.dtype == _stored_dtype(stored) and parameter.is_contiguous():
        _read_into(parameter, stored, file)
    else:
        read = torch.empty(stored.shape, dtype=_stored_dtype(stored))
        _read_into(read, stored, file)
        parameter.copy_(read)


def _read_into(tensor: "torch.Tensor", stored: StoredTensor, file: RawIOBase) -> None:
    """Read a tensor's bytes to where it lies in memory."""
    import torch

    left = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    file.seek(stored.start)
    while left:
        done = file.readinto(left)
        if not done:
            raise StateError(f"{stored.file} became shorter while it was read")
        left = left[done:]


def _demand_finite(tensor: "torch.Tensor", name: str, directory: Path) -> None:
    if not _is_finite(tensor):  # guard: finite-weights
        raise StateError(
            f"{directory}: {name} holds values that are not finite numbers, and was made so: this machine is not at fault. "
            "Tell the host of the run, or make the checkpoint again"
        )


def _is_finite(tensor: "torch.Tensor") -> bool:
    """Whether all values are finite numbers. Then their sum mostly is, and it is faster to compute than their range."""
    import torch

    return bool(tensor.sum().isfinite()) or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


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

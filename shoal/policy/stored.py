"""Where the tensors of a safetensors file are, after checking that the file is nothing but what it says.

Called by `files` and `adapters`. Light: it reads headers, and no weights.

A safetensors file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.errors import StateError, cause_of
from shoal.policy import adapterspec
from shoal.policy.spec import read_capped
from shoal.protocol.constants import MAX_SAFETENSORS_HEADER_BYTES, MAX_TENSORS

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
"""Bytes per value of the dtypes that a policy may have, by safetensors' names. I8: see `quantise`; U8: `nf4spec`."""

WEIGHTS = "model.safetensors"

INDEX = "model.safetensors.index.json"
"""Says which shard a tensor is in, if the weights are in several files."""

MAX_INDEX_BYTES = 4 << 20
"""Size of the index of shards: enough for MAX_TENSORS tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: `start` and `end` are byte offsets from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Identity(NamedTuple):
    """What tells a file from others, and from itself after a change, without reading it. Its other names share it."""

    device: int
    inode: int
    size: int
    changed_ns: int


def identity_of(path: Path) -> Identity:
    """Of a file that exists. Raises OSError."""
    found = path.stat()
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def files_of_base(directory: Path) -> list[Path]:
    """The files with the weights that an adapter in the same directory belongs to: those that a model is loaded from, as
    far as they are there. Raises `StateError` if the index is damaged or hostile."""
    found = [Path(directory) / name for name in names_of_weights(directory)]
    return [path for path in found if path.name != adapterspec.WEIGHTS and path.exists()]


def key_of_base(directory: Path) -> str:
    """What changes whenever the weights that an adapter in the same directory belongs to are other ones.

    The index says which tensor counts of which file, so it is in it. Raises OSError, `StateError`.
    """
    files = [identity_of(path) for path in files_of_base(directory)]
    index = Path(directory) / INDEX
    told = hashlib.sha256(read_capped(index, MAX_INDEX_BYTES)).hexdigest() if index.exists() else ""
    return hashlib.sha256(repr((files, told)).encode()).hexdigest()  # guard: base-by-its-index


def names_of_weights(directory: Path) -> list[str]:
    """The files that hold the weights of a directory's model, there or not: one, or the shards that its index names. Raises
    `StateError`."""
    shards = shards_of(Path(directory))
    return [WEIGHTS] if shards is None else sorted(set(shards.values()))


def shards_of(directory: Path) -> dict[str, str] | None:
    """The shard of each tensor, by the index; None if the weights are in one file. Raises `StateError`."""
    if (directory / WEIGHTS).exists() or not (directory / INDEX).exists():
        return None
    index = decode_strictly(read_capped(directory / INDEX, MAX_INDEX_BYTES), _Index, directory / INDEX)
    for shard in sorted(set(index.weight_map.values())):
        # guard: names-of-shards
        if not shard.endswith(".safetensors") or Path(shard).name != shard or not shard.isprintable():
            raise StateError(f"{directory / INDEX} names {shard!r}: a shard is a .safetensors file beside it")
    return index.weight_map


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that they fill it exactly, without gaps or overlaps.

    Raises `StateError` if it is anything but a plain, whole file of tensors of these dtypes.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
                raise StateError(f"{path} is not a whole safetensors file: header of {length} in {size} bytes")
            header = decode_strictly(file.read(length), dict[str, Any], path)
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. {path.parent} must be a model's directory") from None
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


def decode_strictly(data: bytes, kind: Any, path: Path) -> Any:
    """A small JSON file of a checkpoint as a type. Raises `StateError`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{path} is damaged: {error}. Download the model again") from None

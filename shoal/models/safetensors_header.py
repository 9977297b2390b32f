"""Where the tensors of a safetensors file are, after checking that the file is nothing but what it says.

Light: it reads headers, and of weights only those that may be stored twice.

A safetensors file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import StateError, cause_of
from shoal.protocol.constants import MAX_JSON_BYTES, MAX_SAFETENSORS_HEADER_BYTES, MAX_TENSORS

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
"""Bytes per value of the dtypes that a policy may have, by safetensors' names. I8: see `int8`; U8: `nf4_layout`."""

MASKS = {
    "gpt2": (".attn.bias", ".crossattention.bias"), "gpt-sw3": (".attn.bias", ".crossattention.bias"),
    "gpt_neox": (".attention.bias", ".attention.masked_bias"),
}  # fmt: skip
"""Ends of the names of masks that old checkpoints hold, by architecture: `transformers` ignores them."""

MASK_DTYPES = ("BOOL", "U8")

WEIGHTS = "model.safetensors"

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The weights of an adapter, which may lie beside those of its base."""

INDEX = "model.safetensors.index.json"
"""Says which shard a tensor is in, if the weights are in several files."""

MAX_INDEX_BYTES = 4 << 20
"""Size of the index of shards: enough for MAX_TENSORS tensors."""


_LFS_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS leaves in the place of a large one."""

_PAGES = b"<!doctype html", b"<html"
"""How web pages begin, in small letters."""

_ZIP, _GGUF = b"PK\x03\x04", b"GGUF"
"""How pickles of torch and weights in GGUF begin."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: `start` and `end` are byte offsets from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


_TYPES = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
    "list": "a list", "object": "a table", "dict": "a table", "NoneType": "null",
}  # fmt: skip
"""What types of JSON and Python are called in errors."""


class Identity(NamedTuple):
    """What tells a file from others, and from itself after a change, without reading it. Its other names share it."""

    device: int
    inode: int
    size: int
    changed_ns: int


_REMEDIES = {
    _ZIP: (
        "Weights in pickles (.bin) are never read: open the model with AutoModelForCausalLM.from_pretrained, and write it "
        "with save_pretrained, which makes safetensors"
    ),
    _GGUF: "Weights in GGUF are for other programs: download the model in safetensors",
}
"""What to do about weights in another format, by how their files begin."""


def _remedy(path: Path, error: OSError) -> str:
    """What to do about a file of a model that cannot be read, as a sentence without its stop."""
    directory = path.parent
    if not isinstance(error, FileNotFoundError):
        return f"{directory} must be a model's directory that you may read"
    if path.name == "config.json" and (directory / "adapter_config.json").exists():
        return "It holds an adapter alone: `shoal policy merge` makes a whole model of it and its base"
    if not (directory / "config.json").exists():
        return f"{directory} must be a model's directory"
    if path.name == WEIGHTS and any(directory.glob("*.bin")):
        return _REMEDIES[_ZIP]
    if path.name == WEIGHTS and any(directory.glob("*.gguf")):
        return _REMEDIES[_GGUF]
    if path.name == WEIGHTS and any(directory.glob("model-*.safetensors")):
        return f"Its weights are in several files, and {INDEX}, which names them, is missing: download it"
    if path.name == "tokenizer.json" and any(directory.glob("*.model")):
        return (
            "Open its tokenizer with AutoTokenizer.from_pretrained, and write it with save_pretrained, which makes "
            "tokenizer.json"
        )
    return "The model is not whole: download all its files again"


def open_regular(path: Path) -> BinaryIO:
    """A file, open for reading. Raises OSError, and `StateError` for a pipe or a device, which may give bytes for ever or
    none."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # guard: files-of-models-are-regular
        file.close()
        raise StateError(f"{path} is a pipe or a device in the place of a file: put the file itself there")
    return file


def read_capped(path: Path, limit_bytes: int) -> bytes:
    """Read a small file of a checkpoint. Raises `StateError` if it cannot be read or is larger than `limit_bytes`."""
    try:
        with open_regular(path) as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. {_remedy(path, error)}") from None
    _demand_no_pointer(path, data)
    if data[:200].lstrip().lower().startswith(_PAGES):
        raise StateError(
            f"{path} is a web page (HTML) in the place of the file, as of a download that was refused: download the file "
            "again"
        )
    if len(data) > limit_bytes:
        raise StateError(f"{path} is larger than {limit_bytes} bytes: too large for a model's file of this name")
    return data


def _demand_no_pointer(path: Path, data: bytes) -> None:
    if data.startswith(_LFS_POINTER):
        raise StateError(f"{path} is a pointer of Git LFS in the place of the file: fetch all files (`git lfs pull`)")


def _demand_whole(path: Path, size: int, length: int, begin: bytes) -> None:
    """Refuse a file whose header cannot be within it. `begin` is how the file begins."""
    if size >= 8 and length <= min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
        return
    _demand_no_pointer(path, begin)
    if size < 8:
        raise StateError(f"{path} is not a whole safetensors file: it has {size} bytes. Download it again")
    if length <= MAX_SAFETENSORS_HEADER_BYTES:
        raise StateError(
            f"{path} is not a whole safetensors file: header of {length} in {size} bytes. Download it again"
        )
    remedy = next((remedy for known, remedy in _REMEDIES.items() if begin.startswith(known)), "Download it again")
    raise StateError(f"{path} is not a whole safetensors file: it begins with {ascii(begin)[1:]}. {remedy}")


def identity_of(path: Path) -> Identity:
    """Of a file that exists. Raises OSError."""
    found = path.stat()
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def files_of_base(directory: Path) -> list[Path]:
    """The files with the weights that an adapter in the same directory belongs to: those that a model is loaded from, as
    far as they are there. Raises `StateError` if the index is damaged or hostile."""
    found = [Path(directory) / name for name in names_of_weights(directory)]
    return [path for path in found if path.name != ADAPTER_WEIGHTS and path.exists()]


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


def find_whole(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model, from one file or from the shards that its index names, but for masks that `transformers`
    ignores. Raises `StateError`."""
    shards, found = shards_of(Path(directory)), dict[str, StoredTensor]()
    masks = masks_of(Path(directory))
    if shards is None:
        return _without_masks(read_header(Path(directory) / WEIGHTS, masks), masks)
    for shard in sorted(set(shards.values())):
        found |= read_header(Path(directory) / shard, masks)
    stray = {n for n, t in found.items() if shards.get(n) != t.file.name} | (shards.keys() - found)
    if stray:
        index = Path(directory) / INDEX
        raise StateError(f"{index} and its shards disagree on {sorted(stray)[0]}: download the model again")
    return _without_masks(found, masks)


def masks_of(directory: Path) -> tuple[str, ...]:
    """Ends of the names of masks that a model may hold in its files."""
    try:
        config = msgspec.json.decode(read_capped(directory / "config.json", MAX_JSON_BYTES))
    except (StateError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()  # whoever loads the model says what is wrong
    kind = config.get("model_type") if isinstance(config, dict) else None
    return MASKS.get(kind, ()) if isinstance(kind, str) else ()


def _without_masks(found: dict[str, StoredTensor], masks: tuple[str, ...]) -> dict[str, StoredTensor]:
    return {name: one for name, one in found.items() if not _is_mask(one.dtype, name, masks)}


def _is_mask(dtype: str, name: str, masks: tuple[str, ...]) -> bool:
    return dtype in MASK_DTYPES and f".{name}".endswith(masks)


def differ_in_files(directory: Path, one: str, other: str) -> bool:
    """Whether a model's files hold both tensors, with other values. A model that cannot be read has neither: whoever loads
    it says what is wrong."""
    try:
        found = find_whole(directory)
        if one not in found or other not in found:
            return False
        first, second = found[one], found[other]
        return not _same_values(first, second, identity_of(first.file), identity_of(second.file))
    except (StateError, OSError):
        return False


@lru_cache(maxsize=16)
def _same_values(one: StoredTensor, other: StoredTensor, *_files: Identity) -> bool:
    """Whether two tensors hold the same numbers. Codes of numbers, such as int8, are no numbers."""
    if one.shape != other.shape or {one.dtype, other.dtype} & {"I8", "U8"}:
        return False
    count = math.prod(one.shape)
    return all(
        np.array_equal(_read_floats(one, first, size), _read_floats(other, first, size))
        for first in range(0, count, COMPARED_VALUES)
        for size in [min(COMPARED_VALUES, count - first)]
    )


COMPARED_VALUES = 1 << 22
"""Of each of two tensors at a time."""


def _read_floats(stored: StoredTensor, first: int, count: int) -> NDArray[np.float32]:
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[stored.dtype]
    values = np.fromfile(stored.file, kind, count, offset=stored.start + first * ITEM_BYTES[stored.dtype])
    if stored.dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def read_header(path: Path, masks: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that they fill it exactly, without gaps or overlaps. Only names
    with an end of `masks` may be masks of booleans.

    Raises `StateError` if it is anything but a plain, whole file of tensors of these dtypes.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(24)
            length = int.from_bytes(begin[:8], "little")
            _demand_whole(path, size, length, begin)
            file.seek(8)
            header = decode_strictly(file.read(length), dict[str, Any], path)
    except OSError as error:
        raise StateError(f"cannot read {path}: {cause_of(error)}. {_remedy(path, error)}") from None
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise StateError(f"{path} holds {len(header)} tensors, limit MAX_TENSORS = {MAX_TENSORS}")
    data_start, expected = 8 + length, 0
    entries = {name: _entry(value, name, path, masks) for name, value in header.items()}
    tensors: dict[str, StoredTensor] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        size_bytes = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 1)
        if start != expected or end - start != size_bytes:
            raise StateError(f"{path}: bytes {start}..{end} of {name} do not hold {entry.dtype}{list(entry.shape)}")
        tensors[name] = StoredTensor(path, entry.dtype, entry.shape, data_start + start, data_start + end)
        expected = end
    if data_start + expected != size:
        raise StateError(f"{path} is {size} bytes, its tensors end at {data_start + expected}: download it again")
    return tensors


def _remedy_of_dtype(dtype: str) -> str:
    """What to do about weights of a dtype that no policy has."""
    if dtype in ("F64", "C64"):
        return (
            "Open the model with AutoModelForCausalLM.from_pretrained(..., dtype=torch.float32), and write it with "
            "save_pretrained"
        )
    if dtype.startswith(("F8", "F6", "F4")):
        return "The model is quantised: use it in full precision, or choose another"
    return (
        "If it is a mask, which transformers ignores, save the model again with transformers, which drops it; if it is a "
        "weight, the model is quantised: use it in full precision"
    )


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _entry(value: Any, name: str, path: Path, masks: tuple[str, ...]) -> _Entry:
    try:
        entry = msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise StateError(f"{path}: tensor {name} is malformed: {error}") from None
    if entry.dtype not in ITEM_BYTES and not _is_mask(entry.dtype, name, masks):
        raise StateError(
            f"{path}: tensor {name} is {entry.dtype}; a policy's are one of {', '.join(ITEM_BYTES)}. "
            f"{_remedy_of_dtype(entry.dtype)}"
        )
    if len(entry.shape) > 4 or any(not 0 < side < 1 << 32 for side in entry.shape):
        raise StateError(f"{path}: tensor {name} has shape {list(entry.shape)}, which no policy has")
    return entry


def decode_strictly(data: bytes, kind: Any, path: Path, fault: str = "is damaged") -> Any:
    """A small JSON file of a checkpoint as a type. Raises `StateError`: it names the key whose value is of another type, or
    else the `fault` of the file."""
    try:
        data.decode()  # msgspec skips what the type does not have # guard: unread-texts-are-text
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = re.match(r"Expected `(.+)`, got `.+` - at `\$\.(\w+)(.*)`$", str(error))
        if isinstance(error, msgspec.ValidationError) and found:
            types, key, within = found.groups()
            raise bad_value(path, key, json.loads(data)[key], types.split(" | "), within) from None
        raise StateError(f"{path} {fault}: {error}. Copy or download the model again") from None


def bad_value(path: Path, key: str, value: Any, types: Sequence[str], within: str = "") -> StateError:
    """The error about a key of a JSON file that has a value of none of these types; `within` is the place in it."""
    words = " or ".join(dict.fromkeys(_TYPES.get(one, one) for one in types if one != "int" or "float" not in types))
    place = f"{key}{within} " if within else ""
    return StateError(
        f"{path}: {key} is {json.dumps(value)[:60]}, and {place}must be {words}: correct it there, or copy or download the "
        "model again"
    )

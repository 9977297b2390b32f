"""Writes the weights of a policy tensor by tensor, in files with the bytes that the safetensors library writes.

The library is given all tensors at once; here only one needs to be in memory. In int8, a matrix is two tensors, as `int8`
has it.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.models.config import write_json
from shoal.models.int8 import SCALE, codes_and_scale

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}


class TensorHeader(NamedTuple):
    """What a file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class NamedTensors(Protocol):
    """A policy's tensors by name: a `Published` or a `WeightSnapshot`."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Their shapes; this process may have only parts of them."""

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """One of them on the CPU, in a dtype."""


def written_dtype(dtype: str) -> torch.dtype:
    """Of the values that are written in a dtype, before those of int8 are rounded."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}[dtype]


def write_weights(policy: NamedTensors, path: Path, dtype: str, shard_bytes: int) -> None:
    """Write the weights as the file `path`, or as shards with their index, in float32, bfloat16 or int8. One tensor is
    copied in memory at a time."""
    forms = {name: _forms(name, tuple(tensor.shape), dtype) for name, tensor in policy.tensors.items()}
    write_files(path, forms, lambda name: _as_stored(policy, name, dtype), shard_bytes)


def write_files(
    path: Path,
    forms: Mapping[str, Mapping[str, TensorHeader]],
    tensors_of: Callable[[str], Iterable[tuple[str, Tensor]]],
    shard_bytes: int,
) -> None:
    """Write weights as the file `path`, or as shards with their index. Each has one or more tensors, whose forms are known
    by name and which are made when their turn comes; they are in one file."""
    sizes = {name: sum(form.size for form in own.values()) for name, own in forms.items()}
    shards, places = _shards(sizes, shard_bytes), dict[str, str]()
    count = len(shards)
    files = (
        [path.name] if count == 1 else [f"{path.stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    for file, names in zip(files, shards, strict=True):
        own = {stored: form for name in names for stored, form in forms[name].items()}
        write_tensors(path.parent / file, own, (tensor for name in sorted(names) for tensor in tensors_of(name)))
        places |= dict.fromkeys(own, file)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_json(path.parent / f"{path.name}.index.json", index)


def write_tensors(path: Path, forms: Mapping[str, TensorHeader], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors of these forms, which come one after the other, on the CPU and in any order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, starts = 0, dict[str, int]()
    # As the library, the largest values first: so all are aligned.
    for name, form in sorted(forms.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        starts[name], offset = offset, offset + form.size
        header[name] = {
            "dtype": _NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [starts[name], offset],
        }  # fmt: skip
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors:
            assert TensorHeader(tensor.dtype, tuple(tensor.shape)) == forms[name], (
                f"{name} is {tensor.dtype}{tensor.shape}"
            )
            file.seek(8 + len(encoded) + starts.pop(name))
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    assert not starts, f"{path} lacks {sorted(starts)}"


def _forms(name: str, shape: tuple[int, ...], dtype: str) -> dict[str, TensorHeader]:
    if _is_coded(shape, dtype):
        return {name: TensorHeader(torch.int8, shape), name + SCALE: TensorHeader(torch.float32, (shape[0], 1))}
    return {name: TensorHeader(written_dtype(dtype), shape)}


def _as_stored(policy: NamedTensors, name: str, dtype: str) -> Iterable[tuple[str, Tensor]]:
    values = policy.whole(name, written_dtype(dtype))
    return (codes_and_scale(name, values) if _is_coded(values.shape, dtype) else {name: values}).items()


def _is_coded(shape: tuple[int, ...], dtype: str) -> bool:
    return dtype == "int8" and len(shape) == 2


def _shards(sizes_bytes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """The names of each shard's tensors, in the given order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes_bytes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards

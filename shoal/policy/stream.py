"""Writes the weights of a policy tensor by tensor, in files with the bytes that the safetensors library writes.

Called by `files`. The library is given all tensors at once; here only one needs to be in memory.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.policy.spec import write_json

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class Weights(Protocol):
    """A policy's tensors by name: a `Published` or a `Snapshot`."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Their shapes; this process may have only parts of them."""

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """One of them on the CPU, in a dtype."""


def write_weights(policy: Weights, path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write the weights as the file `path`, or as shards with their index. One tensor is copied in memory at a time."""
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.tensors.items()}
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = _shards(sizes, shard_bytes)
    count = len(shards)
    files = (
        [path.name] if count == 1 else [f"{path.stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    for file, names in zip(files, shards, strict=True):
        own = {name: shapes[name] for name in names}
        write_tensors(path.parent / file, own, dtype, lambda name: policy.whole(name, dtype))
    if count > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_json(path.parent / f"{path.name}.index.json", index)


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensor_of: Callable[[str], Tensor]
) -> None:
    """Write tensors of these shapes; `tensor_of` gives each, on the CPU, when its turn comes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(shapes):
        size = torch.Size(shapes[name]).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shapes[name]), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in sorted(shapes):
            tensor = tensor_of(name)
            assert (tensor.shape, tensor.dtype) == (torch.Size(shapes[name]), dtype), (
                f"{name} is {tensor.dtype}{tensor.shape}"
            )
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _shards(sizes_bytes: dict[str, int], shard_bytes: int) -> list[list[str]]:
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

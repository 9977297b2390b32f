"""Reads the values of stored tensors into memory, and demands that they are what a config asks for, and finite.

Called by `files` and `adapters`, which know what the tensors are. torch is imported late.
"""

import itertools
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import StateError
from shoal.policy.stored import StoredTensor

if TYPE_CHECKING:
    import torch


def demand_same_shapes(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    """Refuse files that hold other tensors than their config asks for. Raises `StateError`."""
    for name in sorted(stored.keys() ^ shapes.keys()):
        fault = "lacks tensor" if name in shapes else "has a tensor that its config does not explain,"
        raise StateError(f"{directory} {fault} {name}: config.json and weights are from different models")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise StateError(f"{directory}: {name} is {list(stored[name].shape)}, config.json asks for {list(shape)}")


def demand_floats(stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Refuse int8 and NF4 where codes would be taken for values. Raises `StateError`."""
    codes = {"U8": "NF4", "I8": "int8"}  # whose constants are int8
    odd = [f"{name} is {codes[dtype]}" for dtype in codes for name, one in stored.items() if one.dtype == dtype]
    if odd:  # guard: int8-only-where-read
        raise StateError(
            f"{directory}: {odd[0]}, which only a whole model of shoal's own reads: use the model in full precision"
        )


def _stored_dtype(stored: StoredTensor) -> "torch.dtype":
    import torch

    codes = {"I8": torch.int8, "U8": torch.uint8}
    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, **codes}[stored.dtype]


def fill_all(tensors: "Mapping[str, torch.Tensor]", stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Read tensors from the files of a directory, each of which is opened once. Raises `StateError` if a value is not a
    finite number."""
    import torch

    in_order = sorted(stored.items(), key=lambda item: (item[1].file, item[1].start))
    with torch.no_grad():
        for path, parts in itertools.groupby(in_order, lambda item: item[1].file):
            with path.open("rb", buffering=0) as file:
                for name, one in parts:
                    _fill(tensors[name], one, file)
                    _demand_finite(tensors[name], name, directory)


def read_rows(stored: StoredTensor, begin: int, end: int, name: str) -> "torch.Tensor":
    """Some rows of a tensor in its file, as float32. Raises `StateError`."""
    import torch

    row_bytes = (stored.end - stored.start) // stored.shape[0]
    first, last = (stored.start + place * row_bytes for place in (begin, end))
    rows = {name: torch.empty(end - begin, *stored.shape[1:])}
    part = StoredTensor(stored.file, stored.dtype, tuple(rows[name].shape), first, last)
    if begin < end:
        fill_all(rows, {name: part}, stored.file.parent)
    return rows[name]


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

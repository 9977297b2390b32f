"""Reads the values of stored tensors into memory, and demands that they are what a config asks for, and finite.

torch is imported late.
"""

import itertools
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import StateError
from shoal.models.config import EMBEDDING, HEAD
from shoal.models.hf_config import SIZES, sizes_said
from shoal.models.safetensors_header import ITEM_BYTES, StoredTensor

if TYPE_CHECKING:
    import torch

SCALE = "_scale"
"""What the name of the scales of a matrix in int8 ends with."""

_PREFIX = "model."
"""What names of tensors begin with, but for the head's."""

_KEYS = {
    "embed_tokens": ("vocab_size", "hidden_size"),
    "lm_head": ("vocab_size", "hidden_size"),
    "k_proj": ("num_key_value_heads", "num_attention_heads", "head_dim", "hidden_size"),
    "v_proj": ("num_key_value_heads", "num_attention_heads", "head_dim", "hidden_size"),
    "q_proj": ("num_attention_heads", "head_dim", "hidden_size"),
    "o_proj": ("num_attention_heads", "head_dim", "hidden_size"),
    "mlp": ("intermediate_size", "hidden_size"),
}
"""Keys of a config that decide the shape of a tensor, by a part of its name."""


def demand_same_shapes(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    """Refuse files that hold other tensors than their config asks for. Raises `StateError`."""
    bare = stored.keys() - {HEAD}
    if bare and {_PREFIX + name for name in bare} <= shapes.keys():
        raise StateError(
            f"{directory}: its tensors have no prefix {_PREFIX}, such as {min(bare)}, as AutoModel writes them, which "
            "saves no head: save the model with AutoModelForCausalLM"
        )
    for name in sorted(stored.keys() ^ shapes.keys()):
        fault = "lacks tensor" if name in shapes else "has a tensor that its config does not explain,"
        raise StateError(f"{directory} {fault} {name}: {cause_of_missing(name)}")
    for name, shape in shapes.items():
        demand_shape(stored[name], name, shape, directory)


def demand_shape(stored: StoredTensor, name: str, shape: tuple[int, ...], directory: Path) -> None:
    """Refuse a tensor of another shape than its config asks for. Raises `StateError`."""
    if tuple(stored.shape) != shape:
        found = f"{directory}: {name} is {list(stored.shape)}, config.json asks for {list(shape)}"
        raise StateError(f"{found}: {cause_of_size(name, directory)}")


def cause_of_missing(name: str) -> str:
    """Why files and their config may disagree on a tensor."""
    if name == HEAD:
        return (
            "if the head is the embedding, set tie_word_embeddings to true in config.json; else they are of two models"
        )
    different = "config.json and weights are from different models: take both from one, or download the model again"
    if name == EMBEDDING:
        return (
            "if it is stored as lm_head.weight alone, as save_model of safetensors writes tied ones, open the model with "
            f"AutoModelForCausalLM and save it with save_pretrained; else {different}"
        )
    return different


def cause_of_size(name: str, directory: Path) -> str:
    """Why a tensor may have another shape than its config asks for, with the values that decide it, and the remedy."""
    if "lora_" in name:
        return "the adapter is of another rank or model: take both from one"
    keys = next((keys for part, keys in _KEYS.items() if part in name), SIZES)
    return (
        f"they are from different models, or a value in config.json is wrong ({sizes_said(directory, keys)}). Correct it, "
        "or take config.json and weights from one model"
    )


def demand_floats(stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Refuse int8 and NF4 where codes would be taken for values. Raises `StateError`."""
    codes = {"U8": "NF4", "I8": "int8"}  # whose constants are int8
    odd = [f"{name} is {codes[dtype]}" for dtype in codes for name, one in stored.items() if one.dtype == dtype]
    if odd:  # guard: int8-only-where-read
        raise StateError(
            f"{directory}: {odd[0]}, which only a whole model of shoal's own reads: use the model in full precision. If it "
            "is a mask, which transformers ignores, save the model again with transformers, which drops it"
        )


def without_scales(
    stored: Mapping[str, StoredTensor], directory: Path
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors of a directory without scales; and by their names, the scales of those that are codes.

    Raises `StateError` if a matrix of codes lacks its scales, or if they are of another form.
    """
    scales = {}
    for name, one in stored.items():
        if one.dtype != "I8":
            continue
        scale = stored.get(name + SCALE)
        # guard: codes-have-scales
        if scale is None or len(one.shape) != 2 or (scale.dtype, scale.shape) != ("F32", (one.shape[0], 1)):
            raise StateError(
                f"{directory}: {name} is int8{list(one.shape)} without {name + SCALE}, F32[{one.shape[0]}, 1]: use the "
                "model in full precision"
            )
        scales[name] = scale
    named = {name + SCALE for name in scales}
    return {name: one for name, one in stored.items() if name not in named}, scales


def demand_finite(stored: Mapping[str, StoredTensor]) -> bool:
    """Refuse files with a value that is not a finite number; codes are always finite. It reads each file once, without
    torch. Raises `StateError`. Returns whether a value is so large that products may overflow."""
    large = False
    for name, one in sorted(stored.items(), key=lambda item: (item[1].file, item[1].start)):
        kind, infinite, much = _FLOAT_BITS.get(one.dtype, ("", 0, 0))
        for start in range(one.start, one.end if kind else one.start, _READ_BYTES):
            size = min(_READ_BYTES, one.end - start)
            values = np.fromfile(one.file, kind, size // ITEM_BYTES[one.dtype], offset=start)
            values &= (1 << 8 * ITEM_BYTES[one.dtype] - 1) - 1  # without their signs
            if not values.size * values.itemsize == size:
                raise StateError(f"{one.file} became shorter while it was read")
            large |= bool((most := values.max()) >= much)
            if most >= infinite:  # guard: finite-before-any-role
                raise StateError(
                    f"{one.file}: {name} holds values that are not finite numbers (NaN or infinite): take a "
                    "checkpoint from before its training diverged, or download it again"
                )
    return large


_FLOAT_BITS = {"F32": ("<u4", 0x7F800000, 0x447A0000), "F16": ("<u2", 0x7C00, 0x63D0), "BF16": ("<u2", 0x7F80, 0x447A)}
"""Of each dtype of floats: its bits as whole numbers, infinity in them, and 1000, which weights that were learned stay
below. NaN is above infinity, and numbers are below."""

_READ_BYTES = 1 << 20
"""At a time, which fits a CPU's cache."""


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
    import torch

    if parameter.dtype == _stored_dtype(stored) and parameter.is_contiguous():
        _read_into(parameter, stored, file)
    else:
        read = torch.empty(stored.shape, dtype=_stored_dtype(stored))
        _read_into(read, stored, file)
        parameter.copy_(read)


def _read_into(tensor: "torch.Tensor", stored: StoredTensor, file: RawIOBase) -> None:
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
            f"{directory}: {name} holds values that are not finite numbers (NaN or infinite), and was made so: this "
            "machine is not at fault. If the model is yours, take a checkpoint from before its training diverged, or "
            "download it again; if you joined a run, tell its host"
        )


def demand_finite_logits(logits: "torch.Tensor", model: Path | str, dtype: str) -> None:
    """Refuse a model, by its directory, that computes other logits than finite numbers from finite weights. Raises
    `StateError`."""
    if not _is_finite(logits):  # guard: finite-logits
        remedy = "" if dtype == "float32" else 'sample in float32 (sampling.dtype = "float32"), or '
        raise StateError(
            f"{model}: its weights are finite numbers, but its logits in {dtype} are not: weights are so large that "
            f"products overflow. If the model is yours, {remedy}take a checkpoint from before its training diverged, or "
            "download it again; if you joined a run, tell its host"
        )


def _is_finite(tensor: "torch.Tensor") -> bool:
    """Whether all values are finite numbers. Then their sum mostly is, and it is faster to compute than their range."""
    import torch

    return bool(tensor.sum().isfinite()) or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())

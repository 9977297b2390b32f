"""Which tensors a directory holds whose layers are NF4 codes.

Light: it imports no torch. `nf4_checkpoint` reads and writes the codes, and `nf4` multiplies by them. What codes are the
matrices of the layers. The others are as they were: a token reads one row of the embedding, the head decides each logit,
and norms are small.

A matrix NAME, [outputs, inputs], is four tensors: NAME_nf4, two codes to a byte; NAME_constants, one of 8 bits for each 64
inputs; NAME_scales, one for each 256 constants in order; and NAME_mean, which is added to all constants.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.errors import StateError
from shoal.models.config import ModelConfig
from shoal.models.safetensors_header import StoredTensor, names_of_weights, read_header

NF4 = "nf4"
"""`policy.adapter.base` of runs whose base is coded."""

BLOCK, GROUP = 64, 256
"""Weights that share a constant; constants that share one."""

PARTS = ("_nf4", "_constants", "_scales", "_mean")
"""What the names of a matrix's tensors end with."""


class Nf4Layout(NamedTuple):
    """What a file says of a tensor."""

    dtype: str
    """By safetensors' names."""
    shape: tuple[int, ...]


def coded_forms(name: str, shape: tuple[int, ...]) -> dict[str, Nf4Layout]:
    """The tensors of one matrix in NF4."""
    outputs, inputs = shape
    constants = outputs * inputs // BLOCK
    forms = (
        Nf4Layout("U8", (outputs, inputs // 2)),
        Nf4Layout("I8", (outputs, inputs // BLOCK)),
        Nf4Layout("F32", (-(-constants // GROUP),)),
        Nf4Layout("F32", (1,)),
    )
    return {name + part: form for part, form in zip(PARTS, forms, strict=True)}


def flaw_of(spec: ModelConfig) -> str:
    """Why a policy of this shape cannot be coded; empty if it can."""
    odd = [f"{name} has {shape[1]}" for name, shape in spec.layer_matrices().items() if shape[1] % BLOCK]
    return f"NF4 takes {BLOCK} inputs of a matrix at a time, and {odd[0]}" if odd else ""


def has_codes(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether tensors of a policy are meant to be NF4, whatever else they are."""
    return any(one.dtype == "U8" for one in stored.values())


def is_coded(directory: Path) -> bool:
    """Whether a directory's policy, or the base of its adapter, is in NF4. Raises `StateError`."""
    files = (Path(directory) / name for name in names_of_weights(directory))
    return any(has_codes(read_header(file)) for file in files if file.exists())


def demand_coded(stored: Mapping[str, StoredTensor], spec: ModelConfig, directory: Path) -> None:
    """Refuse tensors that are not exactly those of a policy of this shape in NF4. Raises `StateError`."""
    fault = flaw_of(spec)
    if fault:
        raise StateError(f"{directory}: {fault}: use the model in full precision")
    matrices, forms = spec.layer_matrices(), dict[str, Nf4Layout]()
    for name, shape in spec.tensor_shapes().items():
        forms |= coded_forms(name, shape) if name in matrices else {name: Nf4Layout("", shape)}
    for name in sorted(stored.keys() ^ forms.keys()):
        fault = "lacks tensor" if name in forms else "has a tensor that a policy in NF4 of its config has not,"
        raise StateError(f"{directory} {fault} {name}: copy it again, or use the model in full precision")
    for name, form in forms.items():
        one = stored[name]
        right = one.dtype == form.dtype or (not form.dtype and one.dtype not in ("U8", "I8"))
        if not right or one.shape != form.shape:  # guard: forms-of-codes
            raise StateError(
                f"{directory}: {name} is {one.dtype}{list(one.shape)}, and its config asks for "
                f"{form.dtype or 'floats'}{list(form.shape)}: copy it again, or use the model in full precision"
            )


_DECODED_VALUES = {"cpu": 1 << 18, "cuda": 1 << 22, "mps": 1 << 22}

MAX_DECODED_VALUES = max(_DECODED_VALUES.values())


def decoded_values(device: str) -> int:
    """Weights that exist decoded at a time: as many as fit a CPU's cache, or fill a GPU."""
    return _DECODED_VALUES.get(device, _DECODED_VALUES["cpu"])

"""Codes of tensors: floats as bits whose order is that of their values, and the form in which a patch holds them."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import StateError
from shoal.models.checkpoint import find_tensors
from shoal.weights.manifest import root_over

# --- Codes of numbers ---
#
# The bits of a value as an unsigned integer, its exponent, and its place in the order of all values. Nothing is rounded, so
# infinities, both zeros and every NaN are codes like any other.
#
# The place of a code: of a float, flip the sign bit if it is 0, else flip all bits. Places then ascend with the values,
# with -0 just before +0, and neighbours differ by one unit in the last place. An integer is its own place. Differences of
# places are taken modulo 2^bits, so adding and subtracting one undo each other for all codes.


Codes = NDArray[np.unsignedinteger]


class Kind(NamedTuple):
    """How a dtype stores a value."""

    bits: int
    mantissa_bits: int = -1
    """-1 for integers."""

    @property
    def codes(self) -> np.dtype[np.unsignedinteger]:
        """The dtype of its codes in numpy."""
        return np.dtype(f"<u{self.bits // 8}")


KINDS = {
    "F32": Kind(32, 23), "F16": Kind(16, 10), "BF16": Kind(16, 7), "F8_E4M3": Kind(8, 3), "F8_E5M2": Kind(8, 2),
    "F64": Kind(32), "I64": Kind(32), "U64": Kind(32), "I32": Kind(32), "U32": Kind(32), "I16": Kind(16),
    "U16": Kind(16), "I8": Kind(8), "U8": Kind(8), "BOOL": Kind(8),
}  # fmt: skip
"""The dtypes, by safetensors' names. A value of 64 bits is two integers of 32: no policy is large in those."""


def exponents(codes: Codes, kind: Kind) -> NDArray[np.uint8]:
    """The exponent's bits of each value, at most eight; 0 for integers."""
    if kind.mantissa_bits < 0:
        return np.zeros(len(codes), np.uint8)
    found = np.empty(len(codes), np.uint8)
    np.right_shift(codes, codes.dtype.type(kind.mantissa_bits), out=found, casting="unsafe")  # drops higher bits
    exponent_bits = kind.bits - 1 - kind.mantissa_bits
    return found if exponent_bits == 8 else found & np.uint8((1 << exponent_bits) - 1)


def places(codes: Codes, kind: Kind) -> Codes:
    """The place of each code in the order of the values."""
    if kind.mantissa_bits < 0:
        return codes
    return codes ^ (signs(codes) | codes.dtype.type(1 << (kind.bits - 1)))


def at_places(places: Codes, kind: Kind) -> Codes:
    """The codes at these places: the inverse of `places`."""
    if kind.mantissa_bits < 0:
        return places
    return places ^ (~signs(places) | places.dtype.type(1 << (kind.bits - 1)))


def signs(codes: Codes) -> Codes:
    """All ones where the highest bit is 1, else 0."""
    signed = codes.view(np.dtype(f"<i{codes.itemsize}"))
    return (signed >> (8 * codes.itemsize - 1)).view(codes.dtype)


# --- The tensors of a version as arrays of codes ---


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """A tensor: its dtype by safetensors' name, its shape, and its values as a flat array of codes."""

    dtype: str
    shape: tuple[int, ...]
    codes: Codes


Weights = Mapping[str, EncodedTensor]
"""The tensors of a version by name."""


def coded(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> EncodedTensor:
    """A tensor over the bytes of an array, which are not copied. Raises `StateError` for an unknown dtype."""
    if dtype not in KINDS:
        raise StateError(f"a tensor is {dtype}: known are {', '.join(KINDS)}")
    return EncodedTensor(dtype, shape, data.reshape(-1).view(np.uint8).view(KINDS[dtype].codes))


def coded_directory(directory: Path, *, writable: bool = False) -> dict[str, EncodedTensor]:
    """The tensors of a checkpoint directory, mapped into memory. `writable`: changes go to its files.

    Raises `StateError` if its files are not plain, whole safetensors files.
    """
    maps: dict[Path, np.ndarray] = {}
    weights = {}
    for name, stored in find_tensors(directory).items():
        if stored.file not in maps:
            mapped = np.memmap(stored.file, np.uint8, "r+" if writable else "r")
            maps[stored.file] = np.asarray(mapped)  # a part of a plain array is made in less time
        weights[name] = coded(stored.dtype, stored.shape, maps[stored.file][stored.start : stored.end])
    return weights


MOST_THREADS = 8
"""Each thread's stack counts for the memory that a volunteer allows, and more threads wait for the disk."""


def cores() -> int:
    """How many threads may hash or patch at one time."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(here, MOST_THREADS)  # guard: few-hashing-threads


def root_of(weights: Weights, *, threads: int = 1) -> str:
    """The weights root of these tensors: that of a directory which holds them."""
    return root_over(digests_of(weights, threads=threads))


def digests_of(weights: Weights, *, threads: int = 1) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and SHA-256 of each tensor, as of `checkpoint.tensors_of`."""
    if sum(one.codes.nbytes for one in weights.values()) < _FEW_BYTES:
        digests = [_digest(one) for one in weights.values()]
    else:
        with ThreadPoolExecutor(threads) as pool:  # hashlib lets other threads run
            digests = list(pool.map(_digest, weights.values()))
    return {name: (one.dtype, one.shape, digest) for (name, one), digest in zip(weights.items(), digests, strict=True)}


_FEW_BYTES = 32 << 20
"""Fewer are hashed sooner than threads are started."""


def _digest(tensor: EncodedTensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor.codes).view(np.uint8).data).hexdigest()

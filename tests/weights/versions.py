"""Small versions of a policy that differ as a step of training makes them differ, for tests of patches."""

import numpy as np

from shoal.weights.delta.golomb_rice import BitReader, read_number, write_number
from shoal.weights.delta.tensor_codes import KINDS, EncodedTensor, Weights

SHAPES = {"embed": (60, 40), "layers.0.up": (90, 40), "layers.0.norm": (40,), "head": (40, 60)}


def as_stored(values: np.ndarray, dtype: str) -> EncodedTensor:
    """Float values as a tensor of this dtype, BF16 rounded to nearest."""
    if dtype == "F16":
        return EncodedTensor(dtype, values.shape, values.astype("<f2").reshape(-1).view("<u2"))
    codes = values.astype("<f4").reshape(-1).view("<u4")
    if dtype == "BF16":
        codes = (codes + 0x7FFF + (codes >> 16 & 1) >> 16).astype("<u2")
    return EncodedTensor(dtype, values.shape, codes)


def versions(seed: int = 0, dtype: str = "BF16", lr: float = 1e-6, shapes=SHAPES) -> tuple[Weights, Weights]:
    """A version and the next: each weight of spread 0.02 moves by about `lr`; the norm does not change."""
    rng = np.random.RandomState(seed)
    old, new = {}, {}
    for name, shape in shapes.items():
        values = np.ones(shape) if "norm" in name else rng.standard_normal(shape) * 0.02
        old[name] = as_stored(values, dtype)
        new[name] = as_stored(values if "norm" in name else values + lr * rng.standard_normal(shape), dtype)
    return old, new


def series(count: int, seed: int = 0, dtype: str = "BF16", lr: float = 1e-6, shapes=SHAPES) -> list[Weights]:
    """Versions of one policy, a step apart."""
    rng = np.random.RandomState(seed)
    values = {name: rng.standard_normal(shape) * 0.02 for name, shape in shapes.items()}
    found = []
    for _ in range(count):
        found.append({name: as_stored(one, dtype) for name, one in values.items()})
        values = {name: one + lr * rng.standard_normal(one.shape) for name, one in values.items()}
    return found


def copied(weights: Weights) -> dict[str, EncodedTensor]:
    return {name: EncodedTensor(one.dtype, one.shape, one.codes.copy()) for name, one in weights.items()}


def equal(one: Weights, other: Weights) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[n].codes, other[n].codes) for n in one)


def random_codes(dtype: str, size: int, rng: np.random.RandomState) -> np.ndarray:
    """Any codes of a dtype: NaN, infinities and denormals too."""
    return np.frombuffer(rng.bytes(size * KINDS[dtype].bits // 8), KINDS[dtype].codes).copy()


def sections_of(patch: bytes) -> tuple[bytes, list[bytes]]:
    """The beginning of a patch, and the changes of each piece."""
    reader, sections = BitReader(patch), []
    head = bytes(reader.take(40))
    while reader.left:
        sections.append(bytes(reader.take(read_number(reader, len(patch)))))
    return head, sections


def framed(head: bytes, sections: list[bytes]) -> bytes:
    """A patch of these changes."""
    return head + b"".join(write_number(len(section)) + section for section in sections)

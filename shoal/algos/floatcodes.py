"""Codes of numbers: the bits of a value as an unsigned integer, its exponent, and its place in the order of all values.

Called by `weights/changes`. Pure, needs only numpy, which has no bfloat16: a tensor is an array of codes here. Nothing is
rounded, so infinities, both zeros and every NaN are codes like any other.

The place of a code: of a float, flip the sign bit if it is 0, else flip all bits. Places then ascend with the values, with
-0 just before +0, and neighbours differ by one unit in the last place. An integer is its own place. Differences of places
are taken modulo 2^bits, so adding and subtracting one undo each other for all codes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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

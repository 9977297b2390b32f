"""Many polynomials at once over the field of 65497 elements: interpolate and evaluate.

Pure, needs only numpy, and knows nothing of proofs. Numbers are float64, which is exact for integers below 2^53. They are
reduced before they exceed 2^51, so results are exact.

Axes: C polynomials, K points of each and as many coefficients, X places to evaluate at.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PRIME = 65497
"""Size of the field: above 0xFF80, so that the code of every finite bfloat16, and of the infinities, is an element."""

_POLYNOMIALS_AT_ONCE = 64
"""Polynomials interpolated together: as many as fit a cache."""


def interpolate(x_CK: Ints, y_CK: Ints) -> Ints:
    """Coefficients, ascending, of the polynomials through the points: Newton's divided differences, then expansion."""
    pieces = range(0, len(x_CK), _POLYNOMIALS_AT_ONCE)
    return np.concatenate(
        [_newton(x_CK[i : i + _POLYNOMIALS_AT_ONCE].T, y_CK[i : i + _POLYNOMIALS_AT_ONCE].T) for i in pieces]
    )


def _newton(x_KC: Ints, y_KC: Ints) -> Ints:
    x_KC, inverse = np.ascontiguousarray(x_KC), _inverses()
    divided_KC = np.ascontiguousarray(y_KC, dtype=np.float64)
    for step in range(1, len(x_KC)):
        # A negative difference d picks entry 65497 + d, which is also its inverse.
        over_KC = inverse[x_KC[step:] - x_KC[:-step]]
        divided_KC[step:] = (divided_KC[step:] - divided_KC[step - 1 : -1]) * over_KC
        if step % 2 == 0:  # 2^16 grows to 2^33 in one step and to 2^50 in two
            divided_KC[step:] = _reduced(divided_KC[step:])
    divided_KC = _reduced(divided_KC)
    coefficient_KC = np.zeros_like(divided_KC)
    coefficient_KC[0] = divided_KC[-1]
    for done, row in enumerate(range(len(x_KC) - 2, -1, -1), start=1):
        times_x_KC = coefficient_KC[: done + 1] * x_KC[row]
        coefficient_KC[1 : done + 1] = coefficient_KC[:done]
        coefficient_KC[0] = divided_KC[row]
        coefficient_KC[: done + 1] -= times_x_KC
        if done % 2 == 0:
            coefficient_KC[: done + 1] = _reduced(coefficient_KC[: done + 1])
    return coefficient_KC.T.astype(np.int64) % PRIME


def evaluate(coefficients_CK: Ints, x_CX: Ints) -> Ints:
    """Values of the polynomials at x. 16 powers of x, then powers of x^16, make most of the work one matrix product."""
    C, K = coefficients_CK.shape
    giants = -(-K // 16)
    padded_CK = np.zeros((C, 16 * giants))
    padded_CK[:, :K] = coefficients_CK
    small_bCX = _powers(x_CX.astype(np.float64), 17)
    giant_aCX = _powers(small_bCX[16], giants)
    inner_CaX = _reduced(padded_CK.reshape(C, giants, 16) @ small_bCX[:16].swapaxes(0, 1))
    return _reduced((inner_CaX.swapaxes(0, 1) * giant_aCX).sum(0)).astype(np.int64) % PRIME


def _powers(x_CX: Floats, count: int) -> Floats:
    """x^0 .. x^(count - 1), along a new first axis."""
    powers_bCX = np.ones((count, *x_CX.shape))
    for exponent in range(1, count):
        powers_bCX[exponent] = _reduced(powers_bCX[exponent - 1] * x_CX)
    return powers_bCX


def _reduced(value: Floats) -> Floats:
    """The value minus a multiple of 65497: from 0 to 65497, both included, because the quotient is rounded."""
    return value - np.floor(value * (1.0 / PRIME)) * PRIME


@lru_cache(maxsize=1)
def _inverses() -> Floats:
    """1/a in the field for a = 0 .. 65496 (0 for 0), by Fermat: a^(65497 - 2)."""
    base, result, exponent = np.arange(PRIME), np.ones(PRIME, dtype=np.int64), PRIME - 2
    while exponent:
        result = result * base % PRIME if exponent & 1 else result
        base, exponent = base * base % PRIME, exponent >> 1
    return result.astype(np.float64)

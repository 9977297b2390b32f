"""A validator's proof that it did the prefill: four numbers that only the activations give, different for each key.

Validators call this for their own key, and for the keys of those who judged before them, so that each can be checked.

The activations h of a submission's audited tokens are projected twice, over channels by random signs r and over tokens
by random signs c, both drawn from the key (Johnson and Lindenstrauss, Contemp. Math. 26, 1984):

    value_k = sum_n c_kn <h_n, r_k> / |h|        with |h| the norm of all activations

Each value is nearly normal with variance 1, so without the activations the chance to be within `TOLERANCE` of all four
is 1e-6. Rounding changes a value by about its own relative size.

Axes: N tokens, D width, K values.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VALUES = 4
TOLERANCE = 0.04
"""Largest difference between two honest projections; bfloat16 on other hardware reaches 0.01."""


def project(parts: Sequence[NDArray[np.float32]], key: bytes) -> tuple[float, ...]:
    """`VALUES` numbers of the activations under a key; zeros if all activations are zero.

    `parts` are one or more arrays (N_i, D) that together hold the N tokens in order. Each is widened to float64 separately,
    to save memory.
    """
    N, D = sum(len(part) for part in parts), parts[0].shape[1]
    signs = _signs(key, VALUES * (N + D))
    over_tokens_KN, over_channels_KD = signs[: VALUES * N].reshape(VALUES, N), signs[VALUES * N :].reshape(VALUES, D)
    sums_KD, norm2, first = np.zeros((VALUES, D)), 0.0, 0
    for part in parts:
        part_ND = part.astype(np.float64)
        sums_KD += over_tokens_KN[:, first : first + len(part)] @ part_ND  # guard: order-of-tokens
        norm2 += float((part_ND * part_ND).sum())
        first += len(part)
    if norm2 == 0.0:
        return (0.0,) * VALUES
    values_K = (sums_KD * over_channels_KD).sum(1) / norm2**0.5
    return tuple(round(float(value), 6) for value in values_K)


def agree(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two projections under one key come from the same activations. If a value is not a number, they do not."""
    # guard: nan-agrees-with-nothing, length-agrees
    return len(one) == len(other) and all(abs(a - b) <= TOLERANCE for a, b in zip(one, other, strict=True))


def _signs(key: bytes, count: int) -> NDArray[np.float64]:
    """+1 or -1, drawn from the key with the bits of SHAKE-256."""
    stream = np.frombuffer(hashlib.shake_256(b"shoal/v1/projection\0" + key).digest(-(-count // 8)), dtype=np.uint8)
    return np.where(np.unpackbits(stream)[:count] == 1, np.float64(1.0), np.float64(-1.0))

"""TOPLOC: prove the largest activations of every 32 tokens with one short polynomial (arXiv:2501.16007).

The last hidden states of a rollout's policy tokens are divided into chunks of 32 tokens. From each chunk we take the k
values of largest magnitude, as bfloat16 codes y at flat indices x. One polynomial with k coefficients over GF(65497)
goes through the points (x mod m, y), where m <= 65497 is the largest modulus that keeps the indices distinct. A proof is
m and the coefficients, ascending, as big-endian uint16: 2 + 2k bytes, the same as from the python package `toploc` 0.1.6.
If magnitudes tie at the k-th place, we take the lower index and the package takes what `torch.topk` gives. The bytes
differ only for chunks with such a tie, and there each side accepts the other's.

What we changed, and why a proof cannot be forged without the activations
- The sign is compared. The package ignores it, so it accepts negated activations and one constant for all values.
- k depends on the size of the chunk (`top_k`), so that small policies and tails of one token have proofs.
- The error of a value is relative to its size, so that crossing a power of two does not matter. An error above `NEAR`
  is a mismatch.
- The parser knows every length beforehand, and accepts only what a prover can write. It returns a value for any bytes.
  The modulus must be 65497 if a chunk has no more values than that.
- The proof does not contain the index set, but the set is checked. A polynomial with k coefficients goes through any k
  chosen points and is random elsewhere, so one that meets nearly all of the verifier's own k largest values was made
  from their indices. Two tricks against that count are closed. A small modulus maps many indices to one point: here a
  point counts for one index, and a prover that meets every value must have found the same modulus. A constant meets
  every index, but has only one sign and one size.
A forger is left with guessing indices, signs and sizes. If a few channels always hold the largest values, indices and
signs are known, and the bound on the error must tell real sizes from typical ones: largest values that vary by less than
that bound prove nothing.

Axes: P policy tokens of a rollout, D width, C chunks, N values of a chunk, K largest values of a chunk.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PRIME = 65497
"""Size of the field: above 0xFF80, so that the code of every finite bfloat16, and of the infinities, is an element."""

CHUNK_TOKENS = 32
"""Policy tokens under one polynomial. The last chunk of a rollout may have fewer."""

MAX_K = 128
"""Largest number of coefficients."""

NEAR = 1 / 16
"""A larger relative error counts as a mismatch, not as noise. A random code is within it once in 3,000."""

TINY = 1e-30
"""Size below which a value counts as 0."""

_VALUES_AT_ONCE = 1 << 18
"""Values searched together: as many as fit a cache."""


class ChunkFigures(NamedTuple):
    """What `compare` found for each chunk, rollout after rollout: arrays over C."""

    rollout_C: Ints
    """Index of the chunk's rollout."""
    first_C: Ints
    """Index of its first token among the rollout's policy tokens."""
    entries_C: Ints
    """K: number of the verifier's largest values."""
    mismatched_C: Ints
    """How many of them have another sign or size in the proof."""
    error_C: Floats
    """Sum of the relative errors of the others."""


class _Points(NamedTuple):
    """Chunks with the same K, and their places in the order of all chunks."""

    place_C: Ints
    size_C: Ints
    """N of each chunk."""
    index_CK: Ints
    code_CK: Ints


def top_k(num_values: int, width: int) -> int:
    """How many of a chunk's values are proven: 32 below width 256, 64 below 512, else 128; at most one in 8."""
    return max(1, min(32 if width < 256 else 64 if width < 512 else MAX_K, num_values // 8))


def prove(hidden: Sequence[NDArray[np.float32]], k: int = 0, chunk_tokens: int = CHUNK_TOKENS) -> bytes:
    """The proof of some rollouts: one polynomial for each chunk of their hidden states float32[P, D], in order.

    k: for all chunks, instead of `top_k`. Raises ValueError if a state is not finite, a chunk has fewer than k
    values, or no modulus above 2^15 keeps its indices distinct.
    """
    parts: dict[int, bytes] = {}
    for points in _chunks(hidden, k, chunk_tokens):
        # guard: finite-activations
        if ((points.code_CK & 0x7FFF) >= 0x7F80).any():  # a value that is not a number counts as the largest
            raise ValueError("an activation is not finite")
        m_C = _moduli(points)
        coefficients_CK = interpolate(points.index_CK % m_C[:, None], points.code_CK)
        words = np.concatenate([m_C[:, None], coefficients_CK], axis=1).astype(">u2")
        parts |= zip(points.place_C.tolist(), [row.tobytes() for row in words], strict=True)
    return b"".join(parts[place] for place in range(len(parts)))


def compare(
    hidden: Sequence[NDArray[np.float32]], proof: bytes, k: int = 0, chunk_tokens: int = CHUNK_TOKENS
) -> ChunkFigures | str:
    """How far the proof is from the verifier's own hidden states of the same rollouts, or why it is not a proof.

    Arguments as in `prove`; `proof` may be any bytes.
    """
    groups = list(_chunks(hidden, k, chunk_tokens))
    num_chunks = sum(len(points.place_C) for points in groups)
    entries_C = np.zeros(num_chunks, dtype=np.int64)
    for points in groups:
        entries_C[points.place_C] = points.index_CK.shape[1]
    if len(proof) != 2 * (entries_C + 1).sum():  # guard: proof-not-longer, proof-not-shorter
        return "length differs from that of its chunks"
    words = np.frombuffer(proof, dtype=">u2").astype(np.int64)
    start_C = np.cumsum(entries_C + 1) - entries_C - 1
    mismatched_C, error_C = entries_C.copy(), np.zeros(num_chunks)
    for points in groups:
        at_C = start_C[points.place_C]
        m_C = words[at_C]
        coefficients_CK = words[at_C[:, None] + 1 + np.arange(points.index_CK.shape[1])]
        small_C = points.size_C <= PRIME
        # guard: modulus-in-field, modulus-of-small-chunks
        if ((m_C < 1) | (m_C > PRIME) | (small_C & (m_C != PRIME))).any():
            return "modulus that no prover writes"
        if (coefficients_CK >= PRIME).any():  # guard: coefficient-in-field
            return "coefficient outside the field"
        mismatched_C[points.place_C], error_C[points.place_C] = _differ(points, m_C, coefficients_CK)
    lengths = [range(0, len(states_PD), chunk_tokens) for states_PD in hidden]
    rollout_C = np.repeat(np.arange(len(hidden)), [len(starts) for starts in lengths])
    first_C = np.array([first for starts in lengths for first in starts], dtype=np.int64)
    return ChunkFigures(rollout_C, first_C, entries_C, mismatched_C, error_C)


def _differ(points: _Points, m_C: Ints, coefficients_CK: Ints) -> tuple[Ints, Floats]:
    """The number of mismatches in each chunk, and the sum of the other values' relative errors."""
    entries = points.index_CK.shape[1]
    residue_CK = points.index_CK % m_C[:, None]
    said_CK = evaluate(coefficients_CK, residue_CK)
    signs_agree_CK = (said_CK ^ points.code_CK) < 0x8000
    theirs_CK, ours_CK = _magnitudes(said_CK), _magnitudes(points.code_CK)
    error_CK = np.abs(theirs_CK - ours_CK) / np.maximum(np.maximum(theirs_CK, ours_CK), TINY)
    near_CK = signs_agree_CK & (error_CK <= NEAR)  # guard: sign, size
    mismatched_C = entries - near_CK.sum(1)
    # guard: one-index-a-point
    if points.size_C.max() > PRIME:  # otherwise all indices are below the modulus, and every point has one index
        mismatched_C += _doubles(np.where(near_CK, residue_CK, -1 - np.arange(entries)))
    # A prover that meets every value has our set of indices, so it must have found our modulus.
    mismatched_C[(mismatched_C == 0) & (m_C != _moduli(points))] = entries  # guard: modulus-of-the-prover
    return mismatched_C, np.where(near_CK, error_CK, 0).sum(1)


# --- the largest values ---


def _chunks(hidden: Sequence[NDArray[np.float32]], k: int, chunk_tokens: int) -> Iterator[_Points]:
    """The largest values of all chunks; chunks with the same K come together."""
    found: dict[int, list[tuple[int, NDArray[np.float32]]]] = {}
    place = 0
    for states_PD in hidden:
        num_tokens, width = states_PD.shape
        full = num_tokens // chunk_tokens * chunk_tokens
        for part in (states_PD[:full].reshape(-1, chunk_tokens * width), states_PD[full:].reshape(1, -1)):
            rows = max(1, _VALUES_AT_ONCE // max(1, part.shape[1]))
            for piece in (part[start : start + rows] for start in range(0, len(part) if part.size else 0, rows)):
                found.setdefault(k or top_k(piece.shape[1], width), []).append((place, piece))
                place += len(piece)
    for entries, pieces in found.items():
        selected = [_largest(piece, entries) for _, piece in pieces]
        yield _Points(
            np.concatenate([first + np.arange(len(piece)) for first, piece in pieces]),
            np.concatenate([np.full(len(piece), piece.shape[1]) for _, piece in pieces]),
            np.concatenate([index_CK for index_CK, _ in selected]),
            np.concatenate([code_CK for _, code_CK in selected]),
        )


def _largest(values_CN: NDArray[np.float32], k: int) -> tuple[Ints, Ints]:
    """Indices and bfloat16 codes, [C, K], of the k values with the largest rounded magnitude; at ties, lower index first.

    Only candidates are rounded and sorted. A lower limit comes from dividing the values into 4k or more parts: the k-th
    largest of the parts' maxima is at most the k-th largest value. Candidates are the values that may round to that limit.
    """
    C, N = values_CN.shape
    if k > N:
        raise ValueError(f"a chunk of {N} values is too small for its {k} largest")
    bits_CN = np.ascontiguousarray(values_CN, dtype="<f4").view("<u4")
    magnitude_CN = bits_CN & 0x7FFFFFFF
    part = max(1, N // (4 * k))
    peaks = magnitude_CN[:, : N // part * part].reshape(C, part, -1).max(1)
    floor_C = np.partition(peaks, peaks.shape[1] - k, axis=1)[:, -k].astype(np.int64)
    rounding_up_C = np.maximum((_codes(floor_C) << 16) - 0x8000, 0)
    flat = np.flatnonzero(magnitude_CN >= rounding_up_C.astype(np.uint32)[:, None])
    row, column = np.divmod(flat, N)
    code = _codes(bits_CN.reshape(-1)[flat].astype(np.int64))
    order = np.argsort((row << 15) + 0x7FFF - (code & 0x7FFF), kind="stable")
    first_C = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=C))[:-1]])
    chosen_CK = order[first_C[:, None] + np.arange(k)]
    return column[chosen_CK], code[chosen_CK]


def _codes(bits: Ints) -> Ints:
    """Codes of the bfloat16 nearest to float32 values, given as bits; ties go to even, as in torch."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


def _magnitudes(codes: Ints) -> Floats:
    """Absolute values of bfloat16 codes. Infinities and NaN count as the largest float32."""
    bits = np.minimum(codes & 0x7FFF, 0x7F7F).astype("<u4") << 16
    return bits.view("<f4").astype(np.float64)


def _moduli(points: _Points) -> Ints:
    """The largest modulus that keeps the indices of each chunk distinct, int64[C]."""
    m_C = np.full(len(points.index_CK), PRIME)
    open_C = np.flatnonzero(points.size_C > PRIME)
    while open_C.size:
        open_C = open_C[_doubles(points.index_CK[open_C] % m_C[open_C, None]) > 0]
        m_C[open_C] -= 1
        if open_C.size and m_C[open_C].min() <= 2**15:
            raise ValueError("no modulus above 2^15 keeps the indices of a chunk distinct")
    return m_C


def _doubles(values_CK: Ints) -> Ints:
    """How many of a row's values also occur earlier in the row, int64[C]."""
    return (np.diff(np.sort(values_CK, axis=1), axis=1) == 0).sum(1)


# --- Many polynomials at once over the field of 65497 elements: interpolate and evaluate ---
#
# Numbers are float64, which is exact for integers below 2^53. They are reduced before they exceed 2^51, so results are
# exact.
#
# Axes: C polynomials, K points of each and as many coefficients, X places to evaluate at.


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

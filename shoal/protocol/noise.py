"""The noise of seeded sampling: a sample seed and a token's absolute index give the noise of each vocabulary entry.

Engines make noise in several ways, and a validator must make the same noise as the worker. Each way is a family, named for
its arithmetic. A run has one: `Sampling.noise` names it, and every node must have it. The functions here are called by
tests, and by the engine that asks a foreign sampler which family it has; `algos` has fast ones. The token is the argmax of
logits / temperature + noise (Gumbel-max: Maddison et al., arXiv:1411.0030).

Axes: B sequences, V vocabulary.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.constants import PHILOX_ROUNDS

# --- Philox4x32-10 (Salmon et al., SC 2011): counters and a key in, four words out ---

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10: counters [..., 4] and keys [..., 2] of 32-bit words to words [..., 4], each held in a uint64."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


# --- families ---

FamilyName: TypeAlias = Literal[
    "philox", "keyed-philox-rand32-log1p", "keyed-philox-rand64-log", "murmur3-rand32-log1p", "murmur3-rand53-log"
]
"""The names of the families."""

PHILOX, KEYED_32, KEYED_64, MURMUR_32, MURMUR_53 = get_args(FamilyName)


def noise_words(seed: bytes) -> tuple[int, int, int, int]:
    """The four 32-bit words of a sample seed that decide its noise: two for the key, then two for the counter."""
    first, second, third, fourth = (int.from_bytes(seed[i : i + 4], "little") for i in range(0, 16, 4))
    return first, second, third, fourth


def gumbel(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """Gumbel noise, float32[B, V], for the token at an absolute index of each sequence: the family `philox`.

    Word v % 4 of the counter (v // 4, position, seed words 2 and 3) under the key (seed words 0 and 1) makes the
    noise of vocabulary entry v: -log(-log((u + 0.5) / 2^32)), in float64 and then rounded, because in float32 a
    third of the values differ between libraries, and the largest u round to 1, which gives infinity.
    """
    words_B4 = np.array([noise_words(seed) for seed in seeds_B], dtype=np.uint64).reshape(-1, 4)
    quads = (vocabulary + 3) // 4
    counter = np.empty((len(seeds_B), quads, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(quads, dtype=np.uint64)
    counter[..., 1] = np.asarray(positions_B, dtype=np.uint64)[:, None]
    counter[..., 2] = words_B4[:, 2, None]
    counter[..., 3] = words_B4[:, 3, None]
    bits = philox(counter, words_B4[:, None, :2]).reshape(len(seeds_B), quads * 4)[:, :vocabulary]
    uniform_BV = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(uniform_BV))).astype(np.float32)


def keyed_gumbel_32(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """The family `keyed-philox-rand32-log1p`: what older samplers of vLLM on GPUs (model runner 2) make by default.

    Word 0 of the counter (position - 1) under the key (seed words 0 and 1) is the key of the token. Word 0 of the counter
    v under that key, read as a signed number x, gives u = max(x, -x - 1) * 4.6566127342e-10 in float32, at least that
    constant, and the noise -log(-log1p(-u)). vLLM takes both logs in float32, so that its last bits depend on the library;
    here they are in float64.
    """
    words_BV = _keyed_words(seeds_B, positions_B, vocabulary)[..., 0].astype(np.uint32).view(np.int32)
    folded_BV = np.where(words_BV < 0, ~words_BV, words_BV).astype(np.float32)
    uniform_BV = np.maximum(folded_BV * RAND32, RAND32).astype(np.float64)
    return (-np.log(-np.log1p(-uniform_BV))).astype(np.float32)


def keyed_gumbel_64(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """The family `keyed-philox-rand64-log`: what the same sampler makes in float64.

    As `keyed_gumbel_32`, but words 0 (low) and 1 (high) make u = r / 2^64 in float64, within the smallest normal number and
    the largest below 1, and the noise -log(-log(u)).
    """
    words_BV4 = _keyed_words(seeds_B, positions_B, vocabulary)
    uniform_BV = ((words_BV4[..., 1] << _32) | words_BV4[..., 0]).astype(np.float64) * 2.0**-64
    return (-np.log(-np.log(np.clip(uniform_BV, *RAND64_BOUNDS)))).astype(np.float32)


RAND32 = np.float32(4.6566127342e-10)
"""Triton's factor from 31 random bits to [0, 1)."""

RAND64_BOUNDS = (float(np.finfo(np.float64).tiny), float(np.nextafter(1.0, 0.0)))
"""vLLM has no upper bound, and gives infinite noise for one of 2^53 values, which would leave no gap to compare."""


def _keyed_words(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.uint64]:
    """Words [B, V, 4] of Philox with the key that a position gives, one counter a vocabulary entry."""
    keys_B2 = np.array([noise_words(seed)[:2] for seed in seeds_B], dtype=np.uint64).reshape(-1, 2)
    counter_B4 = np.zeros((len(seeds_B), 4), dtype=np.uint64)
    counter_B4[:, 0] = np.asarray(positions_B, dtype=np.uint64) - np.uint64(1)  # of the token before, which it reads
    token_keys_B2 = np.stack([philox(counter_B4, keys_B2)[:, 0], np.zeros(len(seeds_B), np.uint64)], axis=-1)
    counter_V4 = np.zeros((vocabulary, 4), dtype=np.uint64)
    counter_V4[:, 0] = np.arange(vocabulary, dtype=np.uint64)
    return philox(counter_V4[None], token_keys_B2[:, None])


def murmur_gumbel_32(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """The family `murmur3-rand32-log1p`: what vLLM's sampler on GPUs makes by default since it hashes (0.32).

    MurmurHash3 (32 bits, seed 0) of four words, namely seed words 0 and 1, position - 1 and v, gives a word r; u is
    (r + 0.5) / 2^32 rounded to float32, at most 1 - 2^-24, and the noise is -log(-log1p(-u)). vLLM takes log1p by a series
    of degree 8 below 0.25, and both logs in float32, which is off by up to 3e-6 nats; here they are in float64.
    """
    words_BV = _hashed(seeds_B, positions_B, vocabulary, 0)
    uniform_BV = ((words_BV.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32).astype(np.float64)
    return (-np.log(-np.log1p(-np.minimum(uniform_BV, MURMUR32_MOST)))).astype(np.float32)


def murmur_gumbel_53(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """The family `murmur3-rand53-log`: what the same sampler makes in float64.

    As `murmur_gumbel_32`, but a second hash, with the seed 0x9E3779B9, gives the high word: r is the upper 53 of the 64
    bits, u is (r + 0.5) / 2^53 in float64, below 1, and the noise is -log(-log(u)).
    """
    low_BV, high_BV = (_hashed(seeds_B, positions_B, vocabulary, domain) for domain in (0, MURMUR53_DOMAIN))
    bits_BV = ((high_BV << _32) | low_BV) >> np.uint64(11)
    uniform_BV = (bits_BV.astype(np.float64) + 0.5) * 2.0**-53
    return (-np.log(-np.log(np.minimum(uniform_BV, RAND64_BOUNDS[1])))).astype(np.float32)


MURMUR32_MOST = 1.0 - 2.0**-24
"""The largest float32 below 1: vLLM, too, takes the logarithm of at least 2^-24."""

MURMUR53_DOMAIN = 0x9E3779B9


def murmur3(words: list[NDArray[np.uint64]], seed: int) -> NDArray[np.uint64]:
    """MurmurHash3_x86_32 (Appleby, 2011) of 32-bit words, each an array; the arrays broadcast. Held in uint64."""
    h = np.array(seed, np.uint64)
    for word in words:
        key = (_rotated((word * _C1) & _LOW, 15) * _C2) & _LOW
        h = (_rotated(h ^ key, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _LOW
    h = h ^ np.uint64(4 * len(words))  # its length in bytes
    h = ((h ^ (h >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & _LOW
    h = ((h ^ (h >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & _LOW
    return h ^ (h >> np.uint64(16))


_C1, _C2 = np.uint64(0xCC9E2D51), np.uint64(0x1B873593)


def _rotated(word: NDArray[np.uint64], by: int) -> NDArray[np.uint64]:
    return ((word << np.uint64(by)) | (word >> np.uint64(32 - by))) & _LOW


def _hashed(seeds_B: list[bytes], positions_B: NDArray[np.int64], vocabulary: int, domain: int) -> NDArray[np.uint64]:
    words_2B = np.array([noise_words(seed)[:2] for seed in seeds_B], dtype=np.uint64).reshape(-1, 2).T
    read_B = np.asarray(positions_B, dtype=np.uint64) - np.uint64(1)  # of the token before, which the sampler reads
    of_B = [word_B[:, None] for word_B in (*words_2B, read_B & _LOW)]
    return murmur3([*of_B, np.arange(vocabulary, dtype=np.uint64)[None]], domain)


Noise = Callable[[list[bytes], NDArray[np.int64], int], NDArray[np.float32]]

NOISES: Mapping[str, Noise] = MappingProxyType({
    PHILOX: gumbel,
    KEYED_32: keyed_gumbel_32,
    KEYED_64: keyed_gumbel_64,
    MURMUR_32: murmur_gumbel_32,
    MURMUR_53: murmur_gumbel_53,
})  # fmt: skip
"""Each family's reference, by name."""

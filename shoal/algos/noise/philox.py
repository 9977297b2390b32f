"""Gumbel noise by the counter-based generator Philox (Salmon et al., 2011)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# --- Philox4x32-10 in torch (Salmon et al., SC 2011) ---
#
# Counters and a key in, four random words out.
#
# `protocol.noise.philox` is the reference.


ROUNDS = 10
M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> Words:
    """The four words of each counter (c0 to c3) under a key (k0, k1): 32-bit words in int64, of shapes that broadcast.

    Products wrap in int64. A shift extends the sign into a high half, and a low half stays below its high half. A mask
    removes both before the next product.
    """
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & LOW
        c2 = ((p0 >> 32) ^ c3 ^ k1) & LOW
        c1, c3 = p1, p0
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1 & LOW, c2, c3 & LOW


# --- Gumbel noise for seeded sampling, in torch ---
#
# The same bits as the reference in `protocol.noise`.
#
# Philox4x32-10 (Salmon et al., SC 2011) on counters (v // 4, position, seed words 2, 3) under the key (seed words 0, 1),
# then g = -log(-log((u + 0.5) / 2^32)) in float64, rounded to float32 (Gumbel-max: Maddison et al., arXiv:1411.0030).
#
# On a CPU, numpy computes the rounds, because torch takes twice as long for the same bits.
#
# Axes: N tokens to be drawn, Q = ceil(V / 4) counters of one token, V vocabulary.


_PIECE_VALUES, _GPU_PIECE_VALUES = 1 << 16, 1 << 22
"""Values made at a time: as many as fit a CPU's cache during the rounds, or fill a GPU."""


def seed_words(seeds: Sequence[bytes]) -> Tensor:
    """The four 32-bit words of each 32-byte seed that drive its noise, int64[N, 4]."""
    heads = bytearray(b"".join(seed[:16] for seed in seeds))
    return torch.frombuffer(heads, dtype=torch.int32).view(-1, 4).to(torch.int64) & LOW


def gumbel(words_N4: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    """Noise, float32[N, V], for the token at a position of the conversation whose seed words are given.

    words_N4: int64[N, 4] from `seed_words`. positions_N: int64[N], absolute indices. The noise does not depend on how
    tokens are divided into calls.
    """
    device = words_N4.device
    if device.type == "mps":  # which has no float64
        words_N4, positions_N = words_N4.cpu(), positions_N.cpu()
    held = _PIECE_VALUES if words_N4.device.type == "cpu" else _GPU_PIECE_VALUES
    rows = max(1, held // vocabulary)
    pieces = zip(words_N4.split(rows), positions_N.split(rows), strict=True)
    return torch.cat([_piece(words, positions, vocabulary) for words, positions in pieces]).to(device)


def _piece(words_N4: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    bits_N4Q = words_of(words_N4, positions_N, (vocabulary + 3) // 4)
    return noise_of(bits_N4Q).transpose(1, 2).flatten(1)[:, :vocabulary]


def noise_of(bits: Tensor) -> Tensor:
    """The noise, float32, that random words of 32 bits give. It rises with them."""
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def gumbel_at(words_N4: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
    """The noise, float32[N], of one token in each row: what `gumbel` has there."""
    if words_N4.device.type != "cpu":
        place = words_N4.device
        return gumbel_at(words_N4.cpu(), positions_N.cpu(), tokens_N.cpu()).to(place)
    bits_N4 = words_at(words_N4, positions_N, tokens_N // 4)
    return noise_of(bits_N4.gather(1, (tokens_N % 4)[:, None]).squeeze(1))


def words_of(words_N4: Tensor, positions_N: Tensor, Q: int) -> Tensor:
    """The four output words of each row's first Q counters, int64[N, 4, Q]."""
    on_cpu = words_N4.device.type == "cpu"
    return (_philox_numpy if on_cpu else _philox_torch)(words_N4, positions_N, Q)


def words_at(words_N4: Tensor, positions_N: Tensor, counters_N: Tensor) -> Tensor:
    """The four output words of one counter in each row, int64[N, 4], on a CPU."""
    return _rounds(words_N4, positions_N, counters_N.numpy().view(np.uint64)[:, None]).squeeze(-1)


def _philox_numpy(words_N4: Tensor, positions_N: Tensor, Q: int) -> Tensor:
    """The four output words of each counter, int64[N, 4, Q]."""
    return _rounds(words_N4, positions_N, np.arange(Q, dtype=np.uint64)[None])


def _rounds(words_N4: Tensor, positions_N: Tensor, c0: NDArray[np.uint64]) -> Tensor:
    """The four output words, int64[N, 4, Q], of the counters c0, [1, Q] or [N, Q]. Values that counters share are computed
    once and broadcast."""
    k0, k1, c2, c3 = (words_N4.numpy().view(np.uint64)[:, i, None] for i in range(4))
    c1, Q = positions_N.numpy().view(np.uint64)[:, None], c0.shape[1]
    m0, m1, w0, w1, low, half = (np.uint64(value) for value in (M0, M1, W0, W1, LOW, 32))
    for _ in range(ROUNDS):
        p0, p1 = m0 * c0, m1 * c2
        c0, c2 = (p1 >> half) ^ c1, (p0 >> half) ^ c3
        c0 ^= k0
        c2 ^= k1
        p0 &= low
        p1 &= low
        c1, c3 = p1, p0
        k0, k1 = (k0 + w0) & low, (k1 + w1) & low
    bits_N4Q = np.empty((len(words_N4), 4, Q), dtype=np.uint64)
    for i, word_NQ in enumerate((c0, c1, c2, c3)):
        bits_N4Q[:, i] = word_NQ
    return torch.from_numpy(bits_N4Q.view(np.int64))


def _philox_torch(words_N4: Tensor, positions_N: Tensor, Q: int) -> Tensor:
    """`_philox_numpy` for other devices."""
    k0, k1, c2, c3 = (words_N4[:, i, None] for i in range(4))
    c0 = torch.arange(Q, device=words_N4.device)[None]
    return torch.stack(torch.broadcast_tensors(*philox(c0, positions_N[:, None], c2, c3, k0, k1)), dim=1)

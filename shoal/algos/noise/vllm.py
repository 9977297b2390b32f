"""Gumbel noise as vLLM's samplers make it, so that a validator repeats their draws."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.algos.noise.philox import philox

# --- The noise that vLLM's sampler makes on GPUs, in torch ---
#
# The same bits as the reference in `protocol.noise`.
#
# So they check what a vLLM worker sampled, or sample as it does. A token has a key of its own, and a vocabulary entry a
# counter of its own, so this takes four times the rounds of `gumbel`.
#
# Axes: N tokens to be drawn, V vocabulary.


_RAND32 = float(torch.tensor(4.6566127342e-10, dtype=torch.float32))
"""Triton's factor from 31 random bits to [0, 1)."""

_RAND64_BOUNDS = (torch.finfo(torch.float64).tiny, 1.0 - 2.0**-53)

_PIECE_VALUES, _GPU_PIECE_VALUES = 1 << 16, 1 << 22
"""Values made at a time: as many as fit a CPU's cache during the rounds, or fill a GPU."""


def keyed_gumbel_32(words_N4: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    """The family `keyed-philox-rand32-log1p`, float32[N, V]; arguments as of `gumbel.gumbel`."""
    return _in_pieces(_noise_32, words_N4, positions_N, vocabulary)


def keyed_gumbel_64(words_N4: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    """The family `keyed-philox-rand64-log`, float32[N, V]; arguments as of `gumbel.gumbel`."""
    return _in_pieces(_noise_64, words_N4, positions_N, vocabulary)


def _in_pieces(
    noise: Callable[[Tensor, Tensor], Tensor], words_N4: Tensor, positions_N: Tensor, vocabulary: int
) -> Tensor:
    """Noise of the first two words of each vocabulary entry."""
    device = words_N4.device
    if device.type == "mps":  # which has no float64
        return _in_pieces(noise, words_N4.cpu(), positions_N.cpu(), vocabulary).to(device)
    zero, keys_N = torch.zeros_like(positions_N), (words_N4[:, 0], words_N4[:, 1])
    token_keys_N = philox(positions_N - 1, zero, zero, zero, *keys_N)[0]
    entries_V = torch.arange(vocabulary, device=device)[None]
    held, pieces = _PIECE_VALUES if device.type == "cpu" else _GPU_PIECE_VALUES, []
    for keys_n in token_keys_N.split(max(1, held // vocabulary)):
        zero_n1 = torch.zeros_like(keys_n)[:, None]
        low_nV, high_nV, _, _ = philox(entries_V, zero_n1, zero_n1, zero_n1, keys_n[:, None], zero_n1)
        pieces.append(noise(low_nV, high_nV))
    return torch.cat(pieces)


def _noise_32(low_NV: Tensor, _: Tensor) -> Tensor:
    signed_NV = low_NV - ((low_NV >> 31) << 32)
    folded_NV = torch.where(signed_NV < 0, -signed_NV - 1, signed_NV).to(torch.float32)
    uniform_NV = (folded_NV * _RAND32).clamp_min_(_RAND32).to(torch.float64)
    return uniform_NV.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def _noise_64(low_NV: Tensor, high_NV: Tensor) -> Tensor:
    uniform_NV = _rounded(low_NV, high_NV) * 2.0**-64
    return uniform_NV.clamp_(*_RAND64_BOUNDS).log_().neg_().log_().neg_().to(torch.float32)


def _rounded(low_NV: Tensor, high_NV: Tensor) -> Tensor:
    """high * 2^32 + low, rounded once to float64. Both halves and the first product are exact."""
    return high_NV.to(torch.float64).mul_(2.0**32).add_(low_NV.to(torch.float64))


# --- The noise that vLLM's sampler makes by hashing, in torch ---
#
# The same bits as the reference in `protocol.noise`.
#
# The hash is MurmurHash3 (Appleby, 2011) of four words: two of the seed, the position of the token that is read, and the
# vocabulary entry. Its first three words are mixed once a token.
#
# Axes: N tokens to be drawn, V vocabulary.


_LOW = 0xFFFFFFFF
_MOST_32, _MOST_53 = 1.0 - 2.0**-24, 1.0 - 2.0**-53
_DOMAIN_53 = 0x9E3779B9
_BYTES = 16
"""Length of what is hashed."""


def murmur_gumbel_32(words_N4: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    """The family `murmur3-rand32-log1p`, float32[N, V]; arguments as of `gumbel.gumbel`."""
    return _murmur_in_pieces(words_N4, positions_N, vocabulary, wide=False)


def murmur_gumbel_53(words_N4: Tensor, positions_N: Tensor, vocabulary: int) -> Tensor:
    """The family `murmur3-rand53-log`, float32[N, V]; arguments as of `gumbel.gumbel`."""
    return _murmur_in_pieces(words_N4, positions_N, vocabulary, wide=True)


def _murmur_in_pieces(words_N4: Tensor, positions_N: Tensor, vocabulary: int, wide: bool) -> Tensor:
    device = words_N4.device
    if device.type == "mps":  # which has no float64
        return _murmur_in_pieces(words_N4.cpu(), positions_N.cpu(), vocabulary, wide).to(device)
    entries_V = _key(torch.arange(vocabulary, device=device))
    rows = max(1, (_PIECE_VALUES if device.type == "cpu" else _GPU_PIECE_VALUES) // vocabulary)
    pieces = zip(words_N4.split(rows), positions_N.split(rows), strict=True)
    return torch.cat([(_noise_53 if wide else _murmur_noise_32)(words, read, entries_V) for words, read in pieces])


def _murmur_noise_32(words_N4: Tensor, positions_N: Tensor, entries_V: Tensor) -> Tensor:
    words_NV = _hashed(words_N4, positions_N, entries_V, 0)
    uniform_NV = words_NV.to(torch.float64).add_(0.5).mul_(2.0**-32).to(torch.float32).to(torch.float64)
    return uniform_NV.clamp_max_(_MOST_32).neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def _noise_53(words_N4: Tensor, positions_N: Tensor, entries_V: Tensor) -> Tensor:
    low_NV, high_NV = (_hashed(words_N4, positions_N, entries_V, domain) for domain in (0, _DOMAIN_53))
    uniform_NV = ((high_NV << 21) | (low_NV >> 11)).to(torch.float64).add_(0.5).mul_(2.0**-53)
    return uniform_NV.clamp_max_(_MOST_53).log_().neg_().log_().neg_().to(torch.float32)


def _hashed(words_N4: Tensor, positions_N: Tensor, entries_V: Tensor, domain: int) -> Tensor:
    """The hash, 32-bit words in int64[N, V]. Products wrap in int64, which leaves their low halves right."""
    h_N = torch.full_like(positions_N, domain)
    for word_N in (words_N4[:, 0], words_N4[:, 1], (positions_N - 1) & _LOW):
        h_N = _mixed(h_N, _key(word_N))
    h_NV = _mixed(h_N[:, None], entries_V[None]).bitwise_xor_(_BYTES)
    h_NV = h_NV.bitwise_xor_(h_NV >> 16).mul_(0x85EBCA6B).bitwise_and_(_LOW)
    h_NV = h_NV.bitwise_xor_(h_NV >> 13).mul_(0xC2B2AE35).bitwise_and_(_LOW)
    return h_NV.bitwise_xor_(h_NV >> 16)


def _mixed(h: Tensor, key: Tensor) -> Tensor:
    return (_rotated(h ^ key, 13) * 5 + 0xE6546B64) & _LOW


def _key(word: Tensor) -> Tensor:
    return (_rotated((word * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW


def _rotated(word: Tensor, by: int) -> Tensor:
    return ((word << by) | (word >> (32 - by))) & _LOW

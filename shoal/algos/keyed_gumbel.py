"""The noise that vLLM's sampler makes on GPUs, in torch: the same bits as the reference in `protocol.noise`.

Called by the engines of runs that name these families. So they check what a vLLM worker sampled, or sample as it does.
Pure: seeds and positions in, noise out. A token has a key of its own, and a vocabulary entry a counter of its own, so this
takes four times the rounds of `gumbel`.

Axes: N tokens to be drawn, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.algos.philox import philox

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

"""The noise families of `protocol.noise` in torch, with the bits of the references, and the fused kernel.

To add a family, add its reference to `protocol.noise`, and its functions here; for GPUs, also its source.

Axes: N rows, V vocabulary.
"""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.algos.noise.argmax_search import gaps_of, gumbel_max
from shoal.algos.noise.philox import gumbel
from shoal.algos.noise.vllm import keyed_gumbel_32, keyed_gumbel_64, murmur_gumbel_32, murmur_gumbel_53
from shoal.errors import StateError, one_line
from shoal.models.device import CUDA
from shoal.protocol.noise import KEYED_32, KEYED_64, MURMUR_32, MURMUR_53, NOISES, PHILOX, noise_words
from shoal.protocol.seed_chain import sample_seed

if TYPE_CHECKING:
    from shoal.algos.noise.triton import Source

log = logging.getLogger("engine")

Draw = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""`algos.noise.triton.best` for one family: from scaled logits, seed words, positions and perhaps tokens to the largest
scores, their ids, and the scores of the tokens."""

SOURCES: "Mapping[str, tuple[Source, bool]]" = MappingProxyType({
    PHILOX: ("philox", False),
    KEYED_32: ("keyed", False),
    KEYED_64: ("keyed", True),
    MURMUR_32: ("murmur", False),
    MURMUR_53: ("murmur", True),
})  # fmt: skip
"""What the kernel calls each family: the source of its words, and whether it takes more than 32 bits of them."""

TRIED, TRIED_VOCABULARY = 64, 4999
"""So many tokens are drawn, of so many, in a trial: several blocks of the kernel, of which the last is not full."""


def kernel_for(noise: str, device: torch.device) -> Draw | None:
    """The kernel for a family, if it draws the family's tokens on this device; else None."""
    return _tried(noise, device) if device.type == CUDA else None


def draws_the_family(draw: Draw, noise: str, device: torch.device) -> bool:
    """Whether a kernel's tokens and the bits of its scores are those of the family's reference."""
    seeds = [sample_seed(b"fused", index) for index in range(TRIED)]
    positions_N = np.arange(1, TRIED + 1) * 1031
    row_N1, id_V = np.arange(TRIED)[:, None], np.arange(TRIED_VOCABULARY)
    # Rows from flat to peaked. Every eighth is so large that float32 loses the noise, so that many scores are equal.
    scaled_NV = ((row_N1 * 7919 + id_V * 104729) % 997 / 997 * (row_N1 % 8) * 3).astype(np.float32)
    scaled_NV[7::8] = np.float32(2**25) * np.round(scaled_NV[7::8] / 4)
    tokens_N = (np.arange(TRIED) * 2503 + 17) % TRIED_VOCABULARY
    score_NV = scaled_NV + NOISES[noise](seeds, positions_N, TRIED_VOCABULARY)
    ids_N, rows_N = score_NV.argmax(-1), np.arange(TRIED)
    words_N4 = np.array([noise_words(seed) for seed in seeds])
    given = (torch.from_numpy(value).to(device) for value in (scaled_NV, words_N4, positions_N, tokens_N))
    best_N, found_N, own_N = (value.cpu().numpy() for value in draw(*given))
    return (
        found_N.tolist() == ids_N.tolist()
        and best_N.tobytes() == score_NV[rows_N, ids_N].tobytes()
        and own_N.tobytes() == score_NV[rows_N, tokens_N].tobytes()
    )


@lru_cache
def _tried(noise: str, device: torch.device) -> Draw | None:
    try:
        from shoal.algos.noise.triton import best
    except ImportError:
        return None
    source, wide = SOURCES[noise]
    draw = partial(best, source=source, wide=wide)
    try:
        if draws_the_family(draw, noise, device):
            log.info("noise=%s device=%s by=kernel", noise, device)
            return draw
        why = "it differs from the reference"
    except Exception as error:  # noqa: BLE001 - Triton, its compilers and CUDA raise many things where they cannot run
        why = one_line(error)
    log.warning("noise=%s device=%s by=torch, without the fused kernel, which is slower: %s", noise, device, why)
    return None


Noise = Callable[[Tensor, Tensor, int], Tensor]
"""Noise, float32[N, V], from seed words, int64[N, 4], positions, int64[N], and the size of the vocabulary."""


class NoiseScheme(NamedTuple):
    """What sampling and scoring need of the noise. Logits are scaled: divided by the temperature, float32[N, V]."""

    noise: Noise
    best: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The token that wins in each row, int64[N], from scaled logits, seed words and positions. At a tie, the lowest id."""
    gaps: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """The largest score of each row less that of a token, float32[N]; its last argument is the tokens, int64[N]."""


def family(name: str) -> NoiseScheme:
    """The family of that name. Raises `StateError` if this version of shoal does not have it."""
    if name not in FAMILIES:
        raise StateError(f"unknown noise family {name!r}: this version of shoal has {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _with_all_noise(noise: Noise) -> NoiseScheme:
    """A family whose noise is made for every token, also of those that cannot win."""

    def best(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> Tensor:
        return (scaled_NV + noise(words_N4, positions_N, scaled_NV.shape[1])).argmax(-1)

    def gaps(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
        noisy_NV = scaled_NV + noise(words_N4, positions_N, scaled_NV.shape[1])
        return noisy_NV.amax(-1) - noisy_NV.gather(-1, tokens_N[:, None]).squeeze(-1)

    return NoiseScheme(noise, best, gaps)


def _best(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> Tensor:
    return gumbel_max(scaled_NV, words_N4, positions_N)[1]


def _fused_on_gpus(name: str, plain: NoiseScheme) -> NoiseScheme:
    """A family that one kernel draws on a GPU where that is proven to draw the same; elsewhere `plain`."""

    def best(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> Tensor:
        draw = kernel_for(name, scaled_NV.device)
        if draw is None:
            return plain.best(scaled_NV, words_N4, positions_N)
        return draw(scaled_NV, words_N4, positions_N, None)[1]

    def gaps(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
        draw = kernel_for(name, scaled_NV.device)
        if draw is None:
            return plain.gaps(scaled_NV, words_N4, positions_N, tokens_N)
        best_N, _, own_N = draw(scaled_NV, words_N4, positions_N, tokens_N)
        return best_N - own_N

    return NoiseScheme(plain.noise, best, gaps)


_PLAIN = {
    PHILOX: NoiseScheme(gumbel, _best, gaps_of),
    KEYED_32: _with_all_noise(keyed_gumbel_32),
    KEYED_64: _with_all_noise(keyed_gumbel_64),
    MURMUR_32: _with_all_noise(murmur_gumbel_32),
    MURMUR_53: _with_all_noise(murmur_gumbel_53),
}

FAMILIES: Mapping[str, NoiseScheme] = MappingProxyType({
    name: _fused_on_gpus(name, plain) for name, plain in _PLAIN.items()
})  # fmt: skip

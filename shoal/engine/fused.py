"""Whether a GPU draws tokens with the kernel of `algos.fused_gumbel`, which stores no noise.

Called by `families`. The kernel is used where logits are on CUDA and Triton is installed. What it computes depends on
Triton, its compiler and the GPU, and no version is believed: at first use on a device the kernel is tried against the
references of `protocol.noise`, in tokens and in the bits of their scores. If anything differs, or if the kernel does not
run, the noise is made by torch, as on a CPU, and the log says why.

Axes: N rows, V vocabulary.
"""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.policy.device import CUDA
from shoal.protocol.noise import KEYED_32, KEYED_64, MURMUR_32, MURMUR_53, NOISES, PHILOX, noise_words
from shoal.protocol.randomness import sample_seed

if TYPE_CHECKING:
    from shoal.algos.fused_gumbel import Source

log = logging.getLogger("engine")

Draw = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""`algos.fused_gumbel.best` for one family: from scaled logits, seed words, positions and perhaps tokens to the largest
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
        from shoal.algos.fused_gumbel import best
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
        why = " ".join(str(error).split())[:200] or type(error).__name__
    log.warning("noise=%s device=%s by=torch, without the fused kernel, which is slower: %s", noise, device, why)
    return None

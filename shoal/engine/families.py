"""The noise families of `protocol.noise`, as engines compute them: in torch, with the bits of the references.

Called by the engines, which are opened with the family of their run. To add a family, add its reference to
`protocol.noise`, and its functions here; for GPUs, also to `fused`. It does not deal with logits beyond adding noise to
them.

Axes: N rows, V vocabulary.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from shoal.algos.gumbel import gumbel
from shoal.algos.gumbel_max import gaps_of, gumbel_max
from shoal.algos.keyed_gumbel import keyed_gumbel_32, keyed_gumbel_64
from shoal.algos.murmur_gumbel import murmur_gumbel_32, murmur_gumbel_53
from shoal.engine.fused import kernel_for
from shoal.errors import StateError
from shoal.protocol.noise import KEYED_32, KEYED_64, MURMUR_32, MURMUR_53, PHILOX

Noise = Callable[[Tensor, Tensor, int], Tensor]
"""Noise, float32[N, V], from seed words, int64[N, 4], positions, int64[N], and the size of the vocabulary."""


class Family(NamedTuple):
    """What sampling and scoring need of the noise. Logits are scaled: divided by the temperature, float32[N, V]."""

    noise: Noise
    best: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The token that wins in each row, int64[N], from scaled logits, seed words and positions. At a tie, the lowest id."""
    gaps: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """The largest score of each row less that of a token, float32[N]; its last argument is the tokens, int64[N]."""


def family(name: str) -> Family:
    """The family of that name. Raises `StateError` if this version of shoal does not have it."""
    if name not in FAMILIES:
        raise StateError(f"unknown noise family {name!r}: this version of shoal has {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _with_all_noise(noise: Noise) -> Family:
    """A family whose noise is made for every token, also of those that cannot win."""

    def best(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> Tensor:
        return (scaled_NV + noise(words_N4, positions_N, scaled_NV.shape[1])).argmax(-1)

    def gaps(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
        noisy_NV = scaled_NV + noise(words_N4, positions_N, scaled_NV.shape[1])
        return noisy_NV.amax(-1) - noisy_NV.gather(-1, tokens_N[:, None]).squeeze(-1)

    return Family(noise, best, gaps)


def _best(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> Tensor:
    return gumbel_max(scaled_NV, words_N4, positions_N)[1]


def _fused_on_gpus(name: str, plain: Family) -> Family:
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

    return Family(plain.noise, best, gaps)


_PLAIN = {
    PHILOX: Family(gumbel, _best, gaps_of),
    KEYED_32: _with_all_noise(keyed_gumbel_32),
    KEYED_64: _with_all_noise(keyed_gumbel_64),
    MURMUR_32: _with_all_noise(murmur_gumbel_32),
    MURMUR_53: _with_all_noise(murmur_gumbel_53),
}

FAMILIES: Mapping[str, Family] = MappingProxyType({
    name: _fused_on_gpus(name, plain) for name, plain in _PLAIN.items()
})  # fmt: skip

"""Several conversations in one row of tokens, without padding, that do not see each other.

The matrix products, which are nearly all of the work, have one row for each real token. Attention alone works on padded
conversations, some of one family at a time: the conversations of a family begin with the same tokens, which are computed
once. The mathematics of a layer is in `layers`.

Axes: N tokens of the row, n those of one family, P of them shared by its B conversations, S own tokens of the longest,
D width, K key heads, J queries that share one and the key, E head dimension, X all heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models.layers import (
    EmbeddingAndHead,
    Layers,
    LayerWeights,
    Shape,
    attend,
    final_norm,
    finish,
    heads,
    rope_table,
)
from shoal.models.transformer_config import TransformerConfig

MASK_COST = 2
"""How many times longer attention with a mask takes, for each pair of tokens, than causal attention."""

PADDING_TOKENS = 256
"""Most padding, in tokens, of the conversations that one call of attention reads."""


@dataclass(frozen=True)
class SharedPrefixGroup:
    """Conversations that begin with the same tokens. In a row, these come first, then each conversation's own tokens."""

    shared: int
    own: tuple[int, ...]
    """Number of own tokens of each conversation, at least 1."""

    def __post_init__(self) -> None:
        assert self.shared >= 0 and self.own and min(self.own) > 0, f"no conversation is empty: {self}"

    @property
    def tokens(self) -> int:
        """Tokens in the row."""
        return self.shared + sum(self.own)


class _PackedRun:
    """Conversations of one family that one call of attention reads, and where their tokens are."""

    def __init__(self, family: SharedPrefixGroup, begin: int, end: int, device: torch.device) -> None:
        """Conversations `begin` to `end`; the run with the first one also gives what the shared tokens read."""
        P, own = family.shared, torch.tensor(family.own, device=device)
        own_B, starts_B = own[begin:end], (P + own.cumsum(0) - own)[begin:end]
        B, S = end - begin, max(family.own[begin:end])
        offsets_S, first_P = torch.arange(S, device=device), torch.arange(P, device=device)
        tokens_BS = starts_B[:, None] + torch.minimum(offsets_S, own_B[:, None] - 1)
        real_BS = offsets_S < own_B[:, None]
        # `padded` has, for each place of the padded conversations, the token of the family that fills it. After the end of
        # a conversation, its last token is there again.
        if MASK_COST * B * S * (P + S) + P * P / 2 < B * (P + S) ** 2 / 2:
            self.shape = Shape(P, B, S)
            self.padded = torch.cat([first_P, tokens_BS.flatten()])
            places_BS = P + torch.arange(B * S, device=device).view(B, S)
        else:  # each conversation is read from its beginning: no mask, and half of the products
            self.shape = Shape(0, B, P + S)
            self.padded = torch.cat([first_P.expand(B, P), tokens_BS], 1).flatten()
            places_BS = P + torch.arange(B * (P + S), device=device).view(B, P + S)[:, :S]
        places = places_BS[real_BS]
        self.real = places if begin else torch.cat([first_P, places])
        """The places of the tokens that this run answers for, in their order."""
        self.plain = self.shape.shared == P and not begin and end == len(family.own) and bool(real_BS.all())
        """Whether the run is the whole family as it is in the row."""


def packed_hidden_states(
    tokens_N: Tensor, families: Sequence[SharedPrefixGroup], frame: EmbeddingAndHead, layers: Layers
) -> Tensor:
    """Hidden states after the final norm, [N, D], of a row that holds these families one after another."""
    device = tokens_N.device
    runs = [[_PackedRun(family, begin, end, device) for begin, end in _alike(family)] for family in families]
    sizes = [family.tokens for family in families]
    assert sum(sizes) == len(tokens_N), f"{len(tokens_N)} tokens for families of {sum(sizes)}"
    rope = rope_table(frame.spec, torch.cat([_positions(family, device) for family in families]))
    x_ND = frame.embed(tokens_N)
    x_ND = layers(x_ND, lambda x_ND, w: _layer(x_ND, w, rope, runs, sizes, frame.spec))
    return final_norm(x_ND, frame)


def _alike(family: SharedPrefixGroup) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring conversations of similar lengths, so that little is padded."""
    begin, padding = 0, 0
    for place, length in enumerate(family.own):
        padding += max(0, family.own[begin] - length)
        if place > begin and (padding > PADDING_TOKENS or length > family.own[begin]):
            yield begin, place
            begin, padding = place, 0
    yield begin, len(family.own)


def _positions(family: SharedPrefixGroup, device: torch.device) -> Tensor:
    """The position of each token of a family in its conversation."""
    spans = [torch.arange(family.shared, family.shared + length, device=device) for length in family.own]
    return torch.cat([torch.arange(family.shared, device=device), *spans])


def _layer(
    x_ND: Tensor,
    w: LayerWeights,
    rope: Tensor,
    runs: Sequence[Sequence[_PackedRun]],
    sizes: list[int],
    spec: TransformerConfig,
) -> Tensor:
    qk_NKJE, v_NKE = heads(x_ND, w, rope, spec)
    parts = zip(runs, qk_NKJE.split(sizes), v_NKE.split(sizes), strict=True)
    mixed = [_attend(run, qk_nKJE, v_nKE) for family, qk_nKJE, v_nKE in parts for run in family]
    return finish(x_ND, torch.cat(mixed), w)


def _attend(run: _PackedRun, qk_nKJE: Tensor, v_nKE: Tensor) -> Tensor:
    """What the tokens of a run read of those before them, [tokens of the run, X]."""
    if run.plain:
        return attend(qk_nKJE, v_nKE, run.shape)[0]
    padded = attend(qk_nKJE.index_select(0, run.padded), v_nKE.index_select(0, run.padded), run.shape)[0]
    return padded.index_select(0, run.real)

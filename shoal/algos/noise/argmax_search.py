"""The token that seeded sampling chooses, without the noise of tokens that cannot be it: the same bits as with all noise.

With a vocabulary of 151,936, two logarithms for the noise of each token take longer than a small model. The noise is at
most `MOST`, and it rises with the random bits that it is made of. So from the score of any token follow a least logit for
the winner, and for each logit the least bits. Only tokens above both need their noise. It gains where most logits lie far
below the winner's, and nothing where they lie within MOST of it. Pure.

    score    logit / temperature + noise (Gumbel-max: Maddison et al., arXiv:1411.0030)
    leads    the tokens with the largest logits of each block of the vocabulary
    leader   the largest score of the leads: the winner's is at least as large

Axes: N rows, V vocabulary, L leads of a row, Q counters of Philox, for 4 tokens each, M those with a possible winner,
S tokens whose noise is made.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.algos.noise.philox import gumbel, gumbel_at, noise_of, words_at, words_of

SMALLEST = 1 << 16
"""Smaller vocabularies get all their noise: the search costs as much."""

MOST = 22.9
"""No noise is larger: -log(-log((2^32 - 1/2) / 2^32)) is 22.874."""

BLOCK = 1024
"""Tokens of which one is a lead."""

FEW = 1 / 8
"""If fewer counters than this share may have a winner, only they are computed."""

HELD_VALUES = 1 << 21
"""Logits that are searched at a time."""


def gumbel_max(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each row, float32[N], and the lowest id that has it, int64[N].

    scaled_NV: logits / temperature, float32. The others are as for `gumbel`.
    """
    if not _is_searched(scaled_NV):
        return _with_all_noise(scaled_NV, words_N4, positions_N)
    rows = max(1, HELD_VALUES // scaled_NV.shape[1])
    pieces = zip(scaled_NV.split(rows), words_N4.split(rows), positions_N.split(rows), strict=True)
    scores, ids = zip(*(_search(*piece) for piece in pieces), strict=True)
    return torch.cat(scores), torch.cat(ids)


def gaps_of(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
    """The largest score of each row less that of a token, float32[N]."""
    if not _is_searched(scaled_NV):
        noisy_NV = scaled_NV + gumbel(words_N4, positions_N, scaled_NV.shape[1])
        return noisy_NV.amax(-1) - noisy_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
    own_N = scaled_NV.gather(-1, tokens_N[:, None]).squeeze(-1) + gumbel_at(words_N4, positions_N, tokens_N)
    return gumbel_max(scaled_NV, words_N4, positions_N)[0] - own_N


def _is_searched(scaled_NV: Tensor) -> bool:
    """A GPU gets all noise too, because a search would wait for it several times."""
    return scaled_NV.shape[1] >= SMALLEST and scaled_NV.device.type == "cpu"


def _with_all_noise(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
    noisy_NV = scaled_NV + gumbel(words_N4, positions_N, scaled_NV.shape[1])
    ids_N = noisy_NV.argmax(-1)
    return noisy_NV.gather(-1, ids_N[:, None]).squeeze(-1), ids_N


def _search(scaled_NV: Tensor, words_N4: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
    (N, V), (lead_NL, token_NL) = scaled_NV.shape, _leads(scaled_NV)
    largest_N, L = lead_NL.amax(-1), lead_NL.shape[1]
    if not largest_N.isfinite().all():
        return _with_all_noise(scaled_NV, words_N4, positions_N)
    noise_NL = gumbel_at(words_N4.repeat_interleave(L, 0), positions_N.repeat_interleave(L), token_NL.view(-1)).view(
        N, L
    )
    leader_N = (lead_NL + noise_NL).amax(-1)
    # A winner has at least this score. Far more is taken off than float32 loses in a sum.
    least_N1 = (leader_N - 1e-4 - 1e-6 * (leader_N.abs() + largest_N.abs()))[:, None]
    may_NQ = F.pad(scaled_NV >= least_N1 - MOST, (0, -V % 4)).view(torch.int32) != 0
    scaled_NQ4 = F.pad(scaled_NV, (0, -V % 4), value=-torch.inf).view(N, -1, 4)
    row_M, counter_M = may_NQ.nonzero(as_tuple=True)
    if len(row_M) < FEW * may_NQ.numel():
        bits_M4 = words_at(words_N4[row_M], positions_N[row_M], counter_M)
        m_S, i_S = _can_win(bits_M4, scaled_NQ4[row_M, counter_M], least_N1[row_M]).nonzero(as_tuple=True)
        row_S, quad_S, bits_S = row_M[m_S], counter_M[m_S], bits_M4[m_S, i_S]
    else:  # the counters of a row share work
        bits_N4Q = words_of(words_N4, positions_N, scaled_NQ4.shape[1])
        can_N4Q = _can_win(bits_N4Q, scaled_NQ4.transpose(1, 2), least_N1[:, :, None])
        row_S, i_S, quad_S = can_N4Q.nonzero(as_tuple=True)
        bits_S = bits_N4Q[row_S, i_S, quad_S]
    score_S = scaled_NQ4[row_S, quad_S, i_S] + noise_of(bits_S)
    best_N = torch.full((N,), -torch.inf).scatter_reduce_(0, row_S, score_S, "amax")
    wins_S = score_S == best_N[row_S]
    token_S = (quad_S * 4 + i_S)[wins_S]
    return best_N, torch.full((N,), V).scatter_reduce_(0, row_S[wins_S], token_S, "amin")


def _can_win(bits: Tensor, scaled: Tensor, least: Tensor) -> Tensor:
    """Whether the noise may be at least `least - scaled`. In float32 the two sides are off by less than what is added."""
    return bits.to(torch.float32).mul_(2.0**-32).add_(1e-6) >= (scaled - least).exp_().neg_().exp_()


def _leads(scaled_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each block, and its token: [N, L] each."""
    V = scaled_NV.shape[1]
    whole = V - V % BLOCK
    lead_NL, offset_NL = scaled_NV[:, :whole].unflatten(1, (-1, BLOCK)).max(-1)
    token_NL = offset_NL + torch.arange(0, whole, BLOCK)
    if whole < V:
        last_N1, offset_N1 = scaled_NV[:, whole:].max(-1, keepdim=True)
        lead_NL, token_NL = torch.cat([lead_NL, last_N1], 1), torch.cat([token_NL, offset_N1 + whole], 1)
    return lead_NL, token_NL

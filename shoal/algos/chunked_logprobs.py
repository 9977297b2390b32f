"""Log-probability and entropy from hidden states and the output head, a piece of the tokens at a time.

With a vocabulary of 151,936, the logits of 4,096 tokens take 2.5 GB, and the loss needs them three times. Here only one
piece's logits exist at a time; the backward pass computes them again, so the head costs four products instead of three.
`regularisers` has the formulas, and gives the same figures up to rounding.

Axes: N tokens, n tokens of a piece, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.algos.regularisers import entropy_of, gradient_of_logits, logprob_and_entropy


def logprob_and_entropy_of(
    hidden_ND: Tensor, head_VD: Tensor, o_N: Tensor, *, temperature: float, held_values: int
) -> tuple[Tensor, Tensor]:
    """log p_o and H of each token, both [N], differentiable in the hidden states and the head.

    `held_values` is the largest number of logits that exist at a time, but those of one token always do. If all fit, this
    is `logprob_and_entropy` of all logits, with the same bits.
    """
    rows = max(1, held_values // head_VD.shape[0])
    if len(hidden_ND) <= rows:
        return logprob_and_entropy(_logits(hidden_ND, head_VD, temperature), o_N)
    logp_N, H_N = _InPieces.apply(hidden_ND, head_VD, o_N, temperature, rows)
    return logp_N, H_N


def in_pieces(
    hidden_ND: Tensor,
    head_VD: Tensor | None,
    after: Callable[[Tensor], Tensor] | None,
    o_N: Tensor,
    *,
    temperature: float,
    held_values: int,
) -> tuple[Tensor, Tensor]:
    """The same where `after` turns hidden @ head into logits, or where the hidden states are logits already.

    A piece's logits are computed again by autograd, so `after` may have parameters of its own.
    """

    def of_piece(hidden_nD: Tensor, o_n: Tensor) -> tuple[Tensor, Tensor]:
        logits_nV = hidden_nD if head_VD is None else F.linear(hidden_nD, head_VD)
        logits_nV = (logits_nV if after is None else after(logits_nV)).to(_wide(logits_nV))
        return logprob_and_entropy(logits_nV if temperature == 1.0 else logits_nV / temperature, o_n)

    rows = max(1, held_values // len(hidden_ND[0] if head_VD is None else head_VD))
    if len(hidden_ND) <= rows:
        return of_piece(hidden_ND, o_N)
    pieces = [
        checkpoint(of_piece, hidden_nD, o_n, use_reentrant=False, preserve_rng_state=False)
        for hidden_nD, o_n in zip(hidden_ND.split(rows), o_N.split(rows), strict=True)
    ]
    return torch.cat([logp_n for logp_n, _ in pieces]), torch.cat([H_n for _, H_n in pieces])


def _logits(hidden_nD: Tensor, head_VD: Tensor, temperature: float) -> Tensor:
    """logits / temperature, at least float32."""
    logits_nV = F.linear(hidden_nD, head_VD).to(_wide(head_VD))
    return logits_nV if temperature == 1.0 else logits_nV / temperature


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, o_N: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        pieces = [
            logprob_and_entropy(_logits(hidden_nD, head_VD, temperature), o_n)
            for hidden_nD, o_n in zip(hidden_ND.split(rows), o_N.split(rows), strict=True)
        ]
        ctx.save_for_backward(hidden_ND, head_VD, o_N)
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat([logp_n for logp_n, _ in pieces]), torch.cat([H_n for _, H_n in pieces])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, head_VD, o_N = ctx.saved_tensors
        for_hidden, for_head = ctx.needs_input_grad[:2]
        d_hidden_ND = torch.empty_like(hidden_ND) if for_hidden else None
        # The sum over pieces is float32, because a sum of many in bfloat16 would lose the small ones.
        d_head_VD = torch.zeros_like(head_VD, dtype=_wide(head_VD)) if for_head else None
        for n in torch.arange(len(o_N), device=o_N.device).split(ctx.rows):
            piece = slice(int(n[0]), int(n[-1]) + 1)
            logp_nV = _logits(hidden_ND[piece], head_VD, ctx.temperature).log_softmax(-1)
            d_nV = gradient_of_logits(logp_nV, o_N[piece], entropy_of(logp_nV), grads[0][piece], grads[1][piece])
            if ctx.temperature != 1.0:
                d_nV /= ctx.temperature
            d_nV = d_nV.to(hidden_ND.dtype)
            if d_hidden_ND is not None:
                torch.mm(d_nV, head_VD, out=d_hidden_ND[piece])
            if d_head_VD is not None and d_head_VD.dtype == head_VD.dtype:
                d_head_VD.addmm_(d_nV.t(), hidden_ND[piece])
            elif d_head_VD is not None:
                d_head_VD += torch.mm(d_nV.t(), hidden_ND[piece])
        return d_hidden_ND, d_head_VD if d_head_VD is None else d_head_VD.to(head_VD.dtype), None, None, None

"""A policy's weights arranged for generation, and the two passes that read and fill a key/value cache.

Axes: B rows, C new tokens of a row, N = B * C, S columns of the cache, D width, L layers, H query heads, K key/value
heads, G = H / K queries that share a key, E head dimension, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.layers import (
    LayerLow,
    LayerWeights,
    LoraPair,
    Low,
    Shape,
    arranged_low,
    by_row,
    causal_layer,
    final_norm,
    finish,
    heads,
    hidden_states,
    rope_table,
)
from shoal.models.transformer import Transformer, head_order
from shoal.models.transformer_config import TransformerConfig

LARGE = 1 << 23
"""Values from which a head is packed: smaller ones stay in a cache, and their products keep the bits that they had."""

ROWS = 16
"""Rows that oneDNN is told to expect. It multiplies any number."""


def packed(head_VD: Tensor) -> Tensor | None:
    """A large output head on a CPU, in the layout in which oneDNN multiplies it; None where the head is small, is not
    float32 on a CPU, or this build of torch has no oneDNN.

    A turn multiplies few rows by a head that no cache holds. MKL copies the head for that into a layout of its own at each
    product, which takes two thirds of the time. At 16 rows of 384 x 32,768 a product takes 6.9 ms with this copy instead
    of 17.5, at 64 rows 18 instead of 34, at one row 4.4 instead of 3.0.
    """
    if head_VD.numel() < LARGE or head_VD.dtype != torch.float32 or head_VD.device.type != "cpu":
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(head_VD, ROWS)


def product(hidden_ND: Tensor, packed_VD: Tensor) -> Tensor:
    """hidden @ head, fp32[N, V]."""
    return torch.ops.mkldnn._linear_pointwise(hidden_ND, packed_VD, None, "none", [], "")


COLUMN_STEP = 32
"""Cache capacities are multiples of this."""

Copy = tuple[slice, slice]
"""Rows of a cache, and the conversations of a prefill that they copy. One conversation may serve all the rows."""


class Cache:
    """Keys and values of B rows. All rows use the same columns; a row without a token in a column has a hole there.

    `bias_BS` is 0 for a token and -inf for a hole. It is None while there are no holes.
    """

    def __init__(self, spec: TransformerConfig, rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
        capacity = -(-columns // COLUMN_STEP) * COLUMN_STEP
        shape = (spec.layers, rows, spec.kv_heads, capacity, spec.head_dim)
        self.keys_LBKSE = torch.empty(shape, dtype=dtype, device=device)
        self.values_LBKSE = torch.empty(shape, dtype=dtype, device=device)
        self.bias_BS: Tensor | None = None
        self.rows, self.capacity, self.used = rows, capacity, 0
        self._spec = spec

    def advance(self, columns: int) -> int:
        """Use so many more columns; returns the first of them."""
        start, self.used = self.used, self.used + columns
        return start

    def rebuilt(self, rows: Sequence[int], room: int) -> "Cache":
        """A copy of the chosen rows, in that order, with room for at least `room` more columns."""
        S, dtype, device = self.used, self.keys_LBKSE.dtype, self.keys_LBKSE.device
        copy = Cache(self._spec, len(rows), S + room, dtype, str(device))
        for layer in range(self._spec.layers):
            copy.keys_LBKSE[layer, :, :, :S] = self.keys_LBKSE[layer, :, :, :S][rows]
            copy.values_LBKSE[layer, :, :, :S] = self.values_LBKSE[layer, :, :, :S][rows]
        if self.bias_BS is not None:
            copy.bias_BS = torch.zeros(len(rows), copy.capacity, dtype=dtype, device=device)
            copy.bias_BS[:, :S] = self.bias_BS[rows, :S]
        copy.advance(S)
        return copy

    def blank(self, rows: slice, column: int) -> None:
        """Zero some rows from `column` to the last used one: a hole has weight 0, but 0 times NaN would be NaN."""
        self.keys_LBKSE[:, rows, :, column : self.used] = 0
        self.values_LBKSE[:, rows, :, column : self.used] = 0

    def punch(self, column: int, missing_BC: Tensor) -> None:
        """From `column` on, turn the marked tokens, bool[B, C], into holes."""
        if self.bias_BS is None:
            dtype, device = self.keys_LBKSE.dtype, self.keys_LBKSE.device
            self.bias_BS = torch.zeros(self.rows, self.capacity, dtype=dtype, device=device)
        self.bias_BS[:, column : column + missing_BC.shape[1]].masked_fill_(missing_BC, float("-inf"))


class Decoder:
    """A policy ready to generate. It takes over a `Transformer`, of which only the arranged weights remain."""

    @torch.inference_mode()
    def __init__(self, model: Transformer, device: str) -> None:
        arranged = model.arranged(_contiguous, device)
        self._packed_head = packed(model.head_weight()) if model.spec.tied else None
        # A GPU multiplies by a transposed matrix as fast, so a tied head need not be there twice.
        shares = model.spec.tied and (device != "cpu" or self._packed_head is not None)
        self.weights = arranged if shares else arranged._replace(head_DV=arranged.head_DV.contiguous())
        self._norms = [layer.norms() for layer in model.model.layers] if model.adapter else []  # type: ignore[operator]
        self.spec, self.dtype, self.device = model.spec, arranged.frame.embedding_VD.dtype, device

    @torch.inference_mode()
    def adapt(self, layers: Iterable[Mapping[str, LoraPair]]) -> None:
        """Replace the adapter by another, of which these are the parts in each layer."""
        order, adapted = head_order(self.spec).to(self.device), []
        for w, pairs, norms_D in zip(self.weights.layers, layers, self._norms, strict=True):
            moved = {
                name: LoraPair(a.to(self.device), b.to(self.device), scale) for name, (a, b, scale) in pairs.items()
            }
            adapted.append(w._replace(low=_laid_out(arranged_low(moved, self.spec, norms_D, order))))
        self.weights = self.weights._replace(layers=tuple(adapted))

    def rope(self, positions: Tensor) -> Tensor:
        return rope_table(self.spec, positions)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        if self._packed_head is not None:
            return product(hidden_ND, self._packed_head)
        return torch.mm(hidden_ND, self.weights.head_DV).float()

    def hidden_states(self, tokens_BC: Tensor) -> Tensor:
        return hidden_states(tokens_BC, self.weights.frame, self.weights.through)

    def prefill(self, tokens_BC: Tensor, cache: Cache, copies: Sequence[Copy]) -> None:
        """Read right-padded conversations from their beginning, and copy their keys and values into the cache.

        The cache's `used` says how many columns the longest conversation takes, in this call or another. The last layer
        computes only keys and values: what predicts the next token comes from `extend`.
        """
        B, C = tokens_BC.shape
        x_ND = F.embedding(tokens_BC.reshape(-1), self.weights.frame.embedding_VD)
        rope = self.rope(torch.arange(C, device=tokens_BC.device)).repeat(B, 1, 1, 1)
        for layer, w in enumerate(self.weights.layers):
            if layer < self.spec.layers - 1:
                x_ND, k_BKCE, v_BKCE = causal_layer(x_ND, w, rope, Shape(0, B, C), self.spec)
            else:
                _, k_BKCE, v_BKCE = by_row(*heads(x_ND, w, rope, self.spec), B, C)
            for rows, source in copies:
                cache.keys_LBKSE[layer, rows, :, :C] = k_BKCE[source]
                cache.values_LBKSE[layer, rows, :, :C] = v_BKCE[source]
        if cache.used > C:
            for rows, _ in copies:
                cache.blank(rows, C)

    def extend(self, tokens_BC: Tensor, rope: Tensor, cache: Cache) -> Tensor:
        """Hidden states, [B * C, D], of the next C tokens of every row. They fill the next columns of the cache."""
        (B, C), spec = tokens_BC.shape, self.spec
        K, G, E = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
        start, end = cache.advance(C), cache.used
        bias = _attention_bias(cache, start, C, G, K)
        x_ND = F.embedding(tokens_BC.reshape(-1), self.weights.frame.embedding_VD)
        for w, keys_BKSE, values_BKSE in zip(self.weights.layers, cache.keys_LBKSE, cache.values_LBKSE, strict=True):
            qk, v = heads(x_ND, w, rope, spec)
            if C == 1:
                q = qk.view(B * K, G + 1, E).narrow(1, 0, G)
                keys_BKSE.select(2, start).copy_(qk.select(2, G))
                values_BKSE.select(2, start).copy_(v)
            else:
                qk = qk.view(B, C, K, G + 1, E).permute(0, 2, 3, 1, 4)
                q = qk[:, :, :G].reshape(B * K, G * C, E)
                keys_BKSE[:, :, start:end] = qk[:, :, G]
                values_BKSE[:, :, start:end] = v.unflatten(0, (B, C)).transpose(1, 2)
            keys = keys_BKSE.view(B * K, -1, E).narrow(1, 0, end).transpose(1, 2)
            scores = torch.bmm(q, keys) if bias is None else torch.baddbmm(bias, q, keys)
            mixed = torch.bmm(scores.softmax(-1), values_BKSE.view(B * K, -1, E).narrow(1, 0, end))
            if C > 1:
                mixed = mixed.view(B, K, G, C, E).permute(0, 3, 1, 2, 4)
            x_ND = finish(x_ND, mixed.reshape(B * C, -1), w)
        return final_norm(x_ND, self.weights.frame)


def _contiguous(w: LayerWeights) -> LayerWeights:
    """The same weights, with each matrix laid out so that no product needs a transpose."""
    return w._replace(
        qkv_DX=w.qkv_DX.contiguous(),
        out_XD=w.out_XD.contiguous(),
        gate_up_DX=w.gate_up_DX.contiguous(),
        down_FD=w.down_FD.contiguous(),
        low=_laid_out(w.low),
    )


def _laid_out(low: LayerLow | None) -> LayerLow | None:
    """An adapter in memory of its own, in the layout of one that is arranged anew: sums depend on it."""
    if low is None:
        return None
    return LayerLow(*(one and Low(one.down_IR.contiguous(), one.up_RX.contiguous()) for one in low))


def _attention_bias(cache: Cache, start: int, C: int, G: int, K: int) -> Tensor | None:
    """Added to the scores, broadcastable to [B * K, G * C, S]: hides holes, and later ones among the new tokens."""
    S, holes_BS = start + C, cache.bias_BS
    future = None
    if C > 1:
        infinite = torch.full((C, C), float("-inf"), dtype=cache.keys_LBKSE.dtype, device=cache.keys_LBKSE.device)
        future = F.pad(infinite.triu(1), (start, 0)).repeat(G, 1)[None]
    if holes_BS is None:
        return future
    holes = holes_BS[:, None, :S].repeat_interleave(K, 0)
    return holes if future is None else holes + future


def logprobs_of(scaled_xV: Tensor, tokens_x: Tensor) -> Tensor:
    """Log-softmax at the given tokens, [...], of logits that are divided by the temperature."""
    return scaled_xV.log_softmax(-1).gather(-1, tokens_x.unsqueeze(-1)).squeeze(-1)

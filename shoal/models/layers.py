"""The mathematics of one layer, in few operations, for training and generation.

It does not deal with caches or parameter names.

With small tensors, each operation costs microseconds, whatever it computes; with large ones, each is a pass through
memory. So there are few operations. Query, key and value are one matrix, and so are gate and up. Sums with the residual
are part of the products. A norm's weight is part of the matrix after it. Rotary embedding is one complex product; for
it, each key head comes after its queries, with its elements in pairs. Norm and gate have hand-written gradients, which
halve the passes.

Axes: B rows, T tokens of a row, P of them shared by all rows, S = T - P its own, N all tokens, D width, X outputs of a
matrix, H query heads, K key/value heads, G = H / K queries that share a key, J = G + 1 (they and their key), E head
dimension, e = E / 2 pairs, F mlp width, V vocabulary, R rank of all adapters of one arranged matrix, r of one, I inputs, O
outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.rope import frequencies
from shoal.models.transformer_config import TransformerConfig

WORTH_SHARING = 64
"""Number of tokens that must be saved before a batch computes the common start of its rows only once."""


class Low(NamedTuple):
    """A low-rank product that is added to a matrix's (arXiv:2106.09685 eq. 3), in float32."""

    down_IR: Tensor
    """Behind a norm, it includes the norm's weight times sqrt(D)."""
    up_RX: Tensor
    """Includes alpha / rank."""


class LayerLow(NamedTuple):
    """What an adapter adds to the matrices of one layer; None where it adds nothing."""

    qkv: Low | None
    out: Low | None
    gate_up: Low | None
    down: Low | None


class Matrix(Protocol):
    """A matrix, [inputs, outputs], however its values are kept: a `DenseMatrix`, or an `nf4.Nf4Matrix`."""

    def product(self, x_NI: Tensor, added: Tensor | None = None) -> Tensor:
        """x @ matrix, to which the residual or a bias is added in the same pass."""

    def contiguous(self) -> Self:
        """The same, laid out so that no product needs a transpose."""


class DenseMatrix(NamedTuple):
    """A `Matrix` whose values are numbers."""

    weight_IX: Tensor

    def product(self, x_NI: Tensor, added: Tensor | None = None) -> Tensor:
        """See `Matrix`."""
        return torch.mm(x_NI, self.weight_IX) if added is None else torch.addmm(added, x_NI, self.weight_IX)

    def contiguous(self) -> "DenseMatrix":
        """See `Matrix`."""
        return DenseMatrix(self.weight_IX.contiguous())


class LayerWeights(NamedTuple):
    """One layer, arranged. Each matrix is [inputs, outputs]. A matrix after a norm includes its weight times sqrt(D)."""

    qkv_DX: Matrix
    qkv_bias_X: Tensor | None
    heads_norm_KJE: Tensor | None
    """Norm weights of queries and keys, times sqrt(E)."""
    out_XD: Matrix
    gate_up_DX: Matrix
    down_FD: Matrix
    floor: Tensor
    """sqrt(D * eps), [1]."""
    head_floor: Tensor
    """sqrt(E * eps), [1]."""
    low: LayerLow | None = None


class EmbeddingAndHead(NamedTuple):
    """What a policy has before its layers and after them."""

    spec: TransformerConfig
    embedding_VD: Tensor
    norm_D: Tensor
    """The final norm's weight, times sqrt(D)."""
    floor: Tensor
    """As of `LayerWeights`."""

    def embed(self, tokens_N: Tensor) -> Tensor:
        """The states before the layers, [N, D]. As in `transformers`, the pad token's row gets no gradient from here."""
        return F.embedding(tokens_N, self.embedding_VD, self.spec.pad_id)


Body = Callable[[Tensor, LayerWeights], Tensor]
"""What one layer does with the hidden states before it, [N, D]."""

Layers = Callable[[Tensor, Body], Tensor]
"""Takes hidden states through all layers, one after another."""


class ModelWeights(NamedTuple):
    """A whole policy, arranged."""

    frame: EmbeddingAndHead
    layers: tuple[LayerWeights, ...]
    head_DV: Tensor

    def through(self, x_ND: Tensor, body: Body) -> Tensor:
        """See `Layers`."""
        for layer in self.layers:
            x_ND = body(x_ND, layer)
        return x_ND


def hidden_states(tokens_BT: Tensor, frame: EmbeddingAndHead, layers: Layers) -> Tensor:
    """Hidden states after the final norm, [B, T, D], of right-padded rows.

    A token sees only earlier tokens, so padding on the right changes nothing to its left and needs no mask. The common
    start of the rows is computed once: a batch of one group's rollouts computes its prompt only once.
    """
    (B, T), P = tokens_BT.shape, _num_shared(tokens_BT)
    rope = rope_table(frame.spec, torch.arange(T, device=tokens_BT.device))
    rope = torch.cat([rope[:P], rope[P:].repeat(B, 1, 1, 1)])
    x_ND = frame.embed(torch.cat([tokens_BT[0, :P], tokens_BT[:, P:].reshape(-1)]))
    x_ND = layers(x_ND, lambda x_ND, w: causal_layer(x_ND, w, rope, Shape(P, B, T - P), frame.spec)[0])
    x_ND = final_norm(x_ND, frame)
    own_BSD = x_ND[P:].view(B, T - P, -1)
    return own_BSD if P == 0 else torch.cat([x_ND[:P].expand(B, -1, -1), own_BSD], 1)


def _num_shared(tokens_BT: Tensor) -> int:
    """Number of tokens that all rows begin with, or 0 if sharing does not pay. A row's last token is never shared."""
    B, T = tokens_BT.shape
    same_T = (tokens_BT == tokens_BT[:1]).all(0)
    shared = min(int(same_T.long().cumprod(0).sum()), T - 1)
    return shared if shared * (B - 1) >= WORTH_SHARING else 0


def final_norm(x_ND: Tensor, frame: EmbeddingAndHead) -> Tensor:
    """The norm after the last layer."""
    return (unit(x_ND, frame.floor) * frame.norm_D).to(x_ND.dtype)


def rope_table(spec: TransformerConfig, positions: Tensor) -> Tensor:
    """Complex numbers, [..., 1, J, e], that rotate the heads of tokens at given positions (arXiv:2104.09864 eq. 34).

    Those of the queries include the scale of attention, 1 / sqrt(E).
    """
    exponents_e = torch.arange(0, spec.head_dim, 2, device=positions.device).float() / spec.head_dim
    places, scaling = positions[..., None, None, None].float(), spec.rope_scaling
    scale_J1 = torch.ones(spec.heads // spec.kv_heads + 1, 1, device=positions.device)
    scale_J1[:-1] = spec.head_dim**-0.5
    if scaling is None:
        angle = places / spec.rope_theta**exponents_e
    else:
        angle = places * frequencies(scaling, spec.rope_theta, spec.head_dim, positions.device)
        scale_J1 *= scaling.attention
    return torch.polar(torch.ones_like(angle), angle) * scale_J1


class Shape(NamedTuple):
    """The layout of N = P + B * S tokens: P that all rows begin with, then B rows of S tokens of their own."""

    shared: int
    rows: int
    own: int


def causal_layer(
    x_ND: Tensor, w: LayerWeights, rope: Tensor, shape: Shape, spec: TransformerConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer over whole rows; each token sees those before it.

    Returns hidden states [N, D], and the keys and values of the rows' own tokens, [B, K, S, E].
    """
    mixed_NX, k, v = attend(*heads(x_ND, w, rope, spec), shape)
    return finish(x_ND, mixed_NX, w), k, v


def attend(qk_NKJE: Tensor, v_NKE: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """What each token reads of those before it in its row, [N, X]; keys and values of the rows' own tokens."""
    P, B, S = shape
    q, k, v = by_row(qk_NKJE[P:], v_NKE[P:], B, S)
    if P == 0:
        mixed_BHSE = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        mixed_NX = mixed_BHSE.transpose(1, 2).reshape(B * S, -1)
    else:
        first_q, first_k, first_v = by_row(qk_NKJE[:P], v_NKE[:P], 1, P)
        first = F.scaled_dot_product_attention(first_q, first_k, first_v, is_causal=True, scale=1.0, enable_gqa=True)
        all_k, all_v = (torch.cat([f.expand(B, -1, -1, -1), o], 2) for f, o in ((first_k, k), (first_v, v)))
        seen_ST = torch.ones(S, P + S, dtype=torch.bool, device=v.device).tril(P)
        own = F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=seen_ST, scale=1.0, enable_gqa=True)
        mixed_NX = torch.cat([mixed.transpose(1, 2).flatten(0, 1).flatten(1) for mixed in (first, own)])
    return mixed_NX, k, v


def by_row(qk_NKJE: Tensor, v_NKE: Tensor, B: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, T, E], keys and values [B, K, T, E]."""
    qk_BKJTE = qk_NKJE.unflatten(0, (B, T)).permute(0, 2, 3, 1, 4)
    return qk_BKJTE[:, :, :-1].flatten(1, 2), qk_BKJTE[:, :, -1], v_NKE.unflatten(0, (B, T)).transpose(1, 2)


def heads(x_ND: Tensor, w: LayerWeights, rope: Tensor, spec: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys, [N, K, J, E], and values, [N, K, E]."""
    N, K, E = len(x_ND), spec.kv_heads, spec.head_dim
    J = spec.heads // K + 1
    normed_ND = unit(x_ND, w.floor)
    qkv = w.qkv_DX.product(normed_ND, w.qkv_bias_X)
    if w.low is not None:
        qkv = _adapted(qkv, normed_ND, w.low.qkv)
    qk, v = qkv.split((K * J * E, K * E), 1)
    qk = qk.view(N, K, J, E)
    if w.heads_norm_KJE is not None:
        qk = unit(qk, w.head_floor) * w.heads_norm_KJE
    turned = torch.view_as_complex(qk.to(wide(qk.dtype)).view(N, K, J, E // 2, 2)) * rope
    return torch.view_as_real(turned).view(N, K, J, E).to(x_ND.dtype), v.view(N, K, E)


def finish(x_ND: Tensor, mixed_NX: Tensor, w: LayerWeights) -> Tensor:
    """The rest of a layer after attention: the output matrix, then the gated MLP, each added to the residual."""
    if w.low is not None:
        return _finish_adapted(x_ND, mixed_NX, w, w.low)
    x_ND = w.out_XD.product(mixed_NX, x_ND)
    return w.down_FD.product(gated(w.gate_up_DX.product(unit(x_ND, w.floor))), x_ND)


def _finish_adapted(x_ND: Tensor, mixed_NX: Tensor, w: LayerWeights, low: LayerLow) -> Tensor:
    x_ND = _adapted(w.out_XD.product(mixed_NX, x_ND), mixed_NX, low.out)
    normed_ND = unit(x_ND, w.floor)
    gated_NF = gated(_adapted(w.gate_up_DX.product(normed_ND), normed_ND, low.gate_up))
    return _adapted(w.down_FD.product(gated_NF, x_ND), gated_NF, low.down)


def _adapted(product_NX: Tensor, x_NI: Tensor, low: Low | None) -> Tensor:
    """A matrix's product of x with what an adapter adds: summed in float32, and rounded once to the policy's dtype."""
    if low is None:
        return product_NX
    kept = low.down_IR.dtype
    sum_NX = torch.addmm(product_NX.to(kept), torch.mm(x_NI.to(kept), low.down_IR), low.up_RX)
    return sum_NX.to(product_NX.dtype)


def unit(x: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(|x|² + D eps) over the last axis: RMS norm (arXiv:1910.07467 eq. 4) without its weight and sqrt(D)."""
    if torch.is_grad_enabled():
        return _Unit.apply(x, floor)
    return (x / _length(x, floor)).to(x.dtype)


def gated(gate_up_NX: Tensor) -> Tensor:
    """silu(gate) * up, [N, F], from gate and up side by side (arXiv:2002.05202 eq. 6)."""
    if torch.is_grad_enabled():
        return _Gated.apply(gate_up_NX)
    gate_NF, up_NF = gate_up_NX.chunk(2, -1)
    return F.silu(gate_NF).mul_(up_NF)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms and rotations: at least float32, even if the policy has fewer bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _length(x: Tensor, floor: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x.dtype))
    return torch.hypot(norm, floor.to(norm.dtype))


class _Unit(torch.autograd.Function):
    """With y = x / h: dx = (dy − y (y · dy)) / h."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, floor: Tensor) -> Tensor:
        h = _length(x, floor)
        y = (x / h).to(x.dtype)
        ctx.save_for_backward(y, h)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, h = ctx.saved_tensors
        along = (y * dy).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1).div_(h).to(dy.dtype), None


class _Gated(torch.autograd.Function):
    """With y = s(a) b: db = dy s(a) and da = dy b s'(a), written side by side in the input's layout."""

    @staticmethod
    def forward(ctx: Any, gate_up_NX: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_NX)
        gate_NF, up_NF = gate_up_NX.chunk(2, -1)
        return F.silu(gate_NF).mul_(up_NF)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> Tensor:
        (gate_up_NX,) = ctx.saved_tensors
        gate_NF, up_NF = gate_up_NX.chunk(2, -1)
        d_NX = torch.empty_like(gate_up_NX)
        d_gate_NF, d_up_NF = d_NX.chunk(2, -1)
        torch.mul(F.silu(gate_NF), dy_NF, out=d_up_NF)
        torch.ops.aten.silu_backward.grad_input(dy_NF * up_NF, gate_NF, grad_input=d_gate_NF)
        return d_NX


# --- adapters ---


class LoraPair(NamedTuple):
    """The adapter of one matrix, float32."""

    a_rI: Tensor
    b_Or: Tensor
    scale: float
    """alpha / rank."""


def arranged_low(
    pairs: Mapping[str, LoraPair], spec: TransformerConfig, norms_D: tuple[Tensor, Tensor], order: Tensor
) -> LayerLow | None:
    """The adapters of one layer by the matrix that each belongs to; None if it has none.

    `norms_D` are what the inputs of attention and of the MLP are multiplied by (`model.norm_weight`), `order` that of the
    outputs of query, key and value.
    """
    if not pairs:
        return None
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    gate_up = (("gate_proj", spec.mlp_width), ("up_proj", spec.mlp_width))
    return LayerLow(
        qkv=_adapters_together(pairs, qkv, norms_D[0], order),
        out=_adapters_together(pairs, (("o_proj", spec.width),)),
        gate_up=_adapters_together(pairs, gate_up, norms_D[1]),
        down=_adapters_together(pairs, (("down_proj", spec.width),)),
    )


def _adapters_together(
    pairs: Mapping[str, LoraPair],
    matrices: Sequence[tuple[str, int]],
    norm_D: Tensor | None = None,
    order: Tensor | None = None,
) -> Low | None:
    """The adapters of matrices that are one when they are arranged: side by side, with zeros between their outputs."""
    downs, ups, place, width = [], [], 0, sum(size for _, size in matrices)
    for name, size in matrices:
        if name in pairs:
            downs.append(pairs[name].a_rI)
            ups.append(F.pad(pairs[name].b_Or.t() * pairs[name].scale, (place, width - place - size)))
        place += size
    if not downs:
        return None
    down_RI, up_RX = torch.cat(downs), torch.cat(ups)
    down_RI = down_RI if norm_D is None else down_RI * norm_D
    return Low(down_RI.t().contiguous(), up_RX if order is None else up_RX[:, order])

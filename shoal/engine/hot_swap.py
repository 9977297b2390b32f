"""Turns the weights of a decoder from one version of a policy into another, in the same memory, where few values differ.

A decoder has the values of the files in another order: fused, transposed, and multiplied by the norm before them. Each
value that differs is computed as `models.transformer` computes it, and written to its place, so the bits are those of a
decoder that is made anew. Between any two versions this works both ways. It does not deal with blocks, or with whether the
weights may be used meanwhile.

Axes: O outputs and I inputs of a stored matrix, X outputs of an arranged one, D width, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.engine.decoder import Decoder
from shoal.errors import StateError
from shoal.models.checkpoint import MappedTensor, map_policy
from shoal.models.layers import Matrix
from shoal.models.transformer import head_order, heads_norm, norm_weight, scaled

LARGE_BYTES = 256_000_000
"""Smaller policies are loaded anew: that takes less time than comparing and hashing both versions, and little memory."""

WORTH_IT = 0.1
"""If more of the values differ than this share, a decoder is made anew in less time."""

SAMPLED = 1 << 14
"""Values of each tensor that are compared to find that share."""

BLOCK_VALUES = 1 << 20
"""Values that are compared at a time."""


@dataclass(frozen=True)
class _KernelSlot:
    """Where a stored matrix is: value [o, i] is at [i, columns_O[o]] of `into`; without columns, at [o, i]."""

    into: Tensor
    columns_O: Tensor | None = None
    norm: str = ""
    """The norm before the matrix, whose weight the values are multiplied by."""


class WeightChange:
    """What turns the weights of a decoder from one version into another."""

    def __init__(self, decoder: Decoder, before: Path, after: Path) -> None:
        """`before` is the directory that the decoder was made from. Files of small policies are not opened. Raises
        `StateError` if the two are of different shapes, or damaged."""
        self._decoder, self._after_name = decoder, after
        self._before, self._after = dict[str, MappedTensor](), dict[str, MappedTensor]()
        if sum(path.stat().st_size for path in after.glob("*.safetensors")) >= LARGE_BYTES:
            self._before, self._after = map_policy(before, decoder.spec), map_policy(after, decoder.spec)

    @property
    def is_worth_it(self) -> bool:
        """Whether the policy is large and few values differ, judged by the first ones of each tensor."""
        if not self._after:
            return False
        differing = compared = 0
        for name, one in self._after.items():
            other = self._before[name]
            if one.dtype != other.dtype:
                return False
            some = one.codes.reshape(-1)[:SAMPLED]
            differing += int(np.count_nonzero(some != other.codes.reshape(-1)[:SAMPLED]))
            compared += len(some)
        return differing <= WORTH_IT * compared

    def make(self) -> None:
        """Write what differs into the decoder's weights. Raises `StateError` if a value is not a finite number."""
        for name, places in _places(self._decoder).items():
            for place in places:
                self._write(name, place)
        weights, spec = self._decoder.weights, self._decoder.spec
        order = head_order(spec).to(self._decoder.device)
        weights.frame.norm_D.copy_(norm_weight(self._vector("model.norm.weight")))
        for index, layer in enumerate(weights.layers):
            attention = f"model.layers.{index}.self_attn."
            if layer.heads_norm_KJE is not None:
                q_norm, k_norm = (self._vector(f"{attention}{one}_norm.weight") for one in "qk")
                layer.heads_norm_KJE.copy_(heads_norm(q_norm, k_norm, spec, order))
            if layer.qkv_bias_X is not None:
                layer.qkv_bias_X.copy_(torch.cat([self._vector(f"{attention}{one}_proj.bias") for one in "qkv"])[order])
        self._decoder.pack_head()

    def _write(self, name: str, place: _KernelSlot) -> None:
        """Write the values of a matrix that differ, and those that the norm before it scales differently."""
        before_OI, after_OI = self._before[name].codes, self._after[name].codes
        flat, width, device = place.into.view(-1), after_OI.shape[1], self._decoder.device
        rescaled_I = (
            self._before[place.norm].codes != self._after[place.norm].codes if place.norm else np.zeros(1, bool)
        )
        norm_I = norm_weight(self._vector(place.norm)) if place.norm else None
        rows = max(1, BLOCK_VALUES // width)
        for start in range(0, len(after_OI), rows):
            block_OI = after_OI[start : start + rows]
            differs_OI = block_OI != before_OI[start : start + rows]
            if rescaled_I.any():
                differs_OI |= rescaled_I
            at = np.flatnonzero(differs_OI)
            values = self._values(name, block_OI.reshape(-1)[at])
            where = torch.from_numpy(at).to(device) + start * width
            inputs = where % width
            if norm_I is not None:
                values = scaled(values, norm_I[inputs])
            if place.columns_O is not None:
                where = inputs * place.into.shape[1] + place.columns_O[where // width]
            flat[where] = values

    def _vector(self, name: str) -> Tensor:
        return self._values(name, self._after[name].codes)

    def _values(self, name: str, codes: np.ndarray) -> Tensor:
        """Values in the decoder's dtype, as loading converts them."""
        stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self._after[name].dtype]
        values = torch.from_numpy(codes.copy()).view(stored).to(self._decoder.dtype)
        if not values.isfinite().all():  # guard: finite-changes
            raise StateError(f"{self._after_name}: {name} holds values that are not finite numbers")
        return values.to(self._decoder.device)


def _places(decoder: Decoder) -> dict[str, list[_KernelSlot]]:
    """Where each stored matrix is in a decoder. A tied embedding is there twice, unless the head is a view of it."""
    weights, spec = decoder.weights, decoder.spec
    embedding, head = _KernelSlot(weights.frame.embedding_VD), _KernelSlot(weights.head_DV, _columns(weights.head_DV))
    is_view = weights.head_DV.data_ptr() == weights.frame.embedding_VD.data_ptr()
    found = {"model.embed_tokens.weight": [embedding] if is_view else [embedding, head]}
    if not spec.tied:
        found = {"model.embed_tokens.weight": [embedding], "lm_head.weight": [head]}
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv_X = head_order(spec).argsort().to(decoder.device)  # the place of each output, where `head_order` has its source
    for index, layer in enumerate(weights.layers):
        before = f"model.layers.{index}."
        for one, columns_O in zip("qkv", qkv_X.split([queries, keys, keys]), strict=True):
            norm = f"{before}input_layernorm.weight"
            found[f"{before}self_attn.{one}_proj.weight"] = [_KernelSlot(_plain(layer.qkv_DX), columns_O, norm)]
        gate_up_DX, out_XD, down_FD = (_plain(one) for one in (layer.gate_up_DX, layer.out_XD, layer.down_FD))
        for one, columns_O in zip(("gate", "up"), _columns(gate_up_DX).split(spec.mlp_width), strict=True):
            norm = f"{before}post_attention_layernorm.weight"
            found[f"{before}mlp.{one}_proj.weight"] = [_KernelSlot(gate_up_DX, columns_O, norm)]
        found[f"{before}self_attn.o_proj.weight"] = [_KernelSlot(out_XD, _columns(out_XD))]
        found[f"{before}mlp.down_proj.weight"] = [_KernelSlot(down_FD, _columns(down_FD))]
    return found


def _plain(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Tensor), "codes are the base of adapters, which are loaded and not changed"
    return matrix


def _columns(arranged_IX: Tensor) -> Tensor:
    """The outputs of a matrix in the order in which they are stored."""
    return torch.arange(arranged_IX.shape[1], device=arranged_IX.device)

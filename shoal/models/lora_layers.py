"""Low-rank products beside a layer's matrices, arranged as `layers` needs them.

It does not deal with files or names of parameters.

Axes: R rank of all adapters of one arranged matrix together, r of one, I inputs, O outputs, X outputs of an arranged
matrix, D width.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.config import ModelConfig
from shoal.models.layers import LayerLow, Low


class LoraPair(NamedTuple):
    """The adapter of one matrix, float32."""

    a_rI: Tensor
    b_Or: Tensor
    scale: float
    """alpha / rank."""


def arranged_low(
    pairs: Mapping[str, LoraPair], spec: ModelConfig, norms_D: tuple[Tensor, Tensor], order: Tensor
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
        qkv=_together(pairs, qkv, norms_D[0], order),
        out=_together(pairs, (("o_proj", spec.width),)),
        gate_up=_together(pairs, gate_up, norms_D[1]),
        down=_together(pairs, (("down_proj", spec.width),)),
    )


def _together(
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

"""Weights as int8, for the actors of a run that declares int8: QuaRL (arXiv:1910.01055), weights only.

A matrix is a code for each value and a scale for each output, and means codes * scale in float32. Products are computed
in float32, so an actor and its verifier agree as closely as two float32 engines, whatever machines they have; and a
multiplication is rounded alike everywhere. So int8 decides which policy samples, and what is sent. It gains no speed here.

Two ways lead to such a policy. The published version may hold the codes (`policy.dtype`): then every matrix has them, also
embedding and head, which are a quarter of a small model. Else an engine rounds the matrices of the layers when it loads the
version (`sampling.dtype`). It does not deal with activations.

In a file, the codes have the matrix's name, and the scales that name with "_scale".

Axes: O outputs, I inputs of a matrix.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shoal.errors import StateError
from shoal.models.load_tensors import SCALE
from shoal.models.transformer import Transformer

LARGEST = 127
"""Largest int8 value in use. -128 is not used, so that the scale is the same on both sides of 0."""


@torch.no_grad()
def round_to_int8(model: Transformer) -> None:
    """Round the matrices of every layer, in place: symmetric, one scale per output. Embedding, head and norms stay as is.

    The same weights give the same bits on every machine, with a maximum, divisions, and rounding half to even.
    """
    for weight in model.model.layers.parameters():
        if weight.dim() == 2:
            weight.copy_(dequantised(*quantised(weight)))


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8[O, I], and the scale of each output, float32[O, 1]. An output of zeros has scale 1."""
    scale_O1 = weight_OI.float().abs().amax(-1, keepdim=True) / LARGEST
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    return (weight_OI.float() / scale_O1).round().clamp_(-LARGEST, LARGEST).to(torch.int8), scale_O1


def dequantised(values_OI: Tensor, scale_O1: Tensor) -> Tensor:
    """The float32 matrix for the products."""
    return values_OI.float() * scale_O1


# --- in files ---


def codes_and_scale(name: str, weight_OI: Tensor) -> dict[str, Tensor]:
    """What a file holds of a matrix."""
    values_OI, scale_O1 = quantised(weight_OI)
    return {name: values_OI, name + SCALE: scale_O1}


@torch.no_grad()
def multiply(parameters: Mapping[str, Tensor], scales: Mapping[str, Tensor], directory: Path) -> None:
    """Multiply parameters that hold codes by their scales, in place. Raises `StateError` if one gets too large."""
    for name, scale_O1 in scales.items():
        parameters[name].mul_(scale_O1)
        if not parameters[name].isfinite().all():  # guard: finite-products
            raise StateError(f"{directory}: {name} holds values that are not finite numbers: make the checkpoint again")

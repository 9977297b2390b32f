"""Weights rounded to int8, for actors that a run declares as such: QuaRL (arXiv:1910.01055), weight-only.

Called by the local engine when it loads a policy as int8. What is computed with stays float32, so that an actor and
its verifier agree as closely as two float32 engines do: this is about which policy samples, and buys no speed here.
It knows no activations and no files.

Axes: O outputs, I inputs of a matrix.
"""

import torch

from shoal.policy.model import Transformer

LARGEST = 127
"""Of the int8 values in use: -128 stays free, so that the scale is the same on both sides of 0."""


@torch.no_grad()
def round_to_int8(model: Transformer) -> None:
    """Round the matrices of every layer, in place: symmetric, one scale an output. Embedding, head and norms stay.

    The same weights give the same bits on every machine: a maximum, divisions, and rounding half to even.
    """
    for weight in model.model.layers.parameters():
        if weight.dim() == 2:
            weight.copy_(dequantised(*quantised(weight)))


def quantised(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as int8[O, I] and the scale of each output, float32[O, 1]. An output of zeros has scale 1."""
    scale_O1 = weight_OI.float().abs().amax(-1, keepdim=True) / LARGEST
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    return (weight_OI.float() / scale_O1).round().clamp_(-LARGEST, LARGEST).to(torch.int8), scale_O1


def dequantised(values_OI: torch.Tensor, scale_O1: torch.Tensor) -> torch.Tensor:
    """The float32 matrix that is computed with."""
    return values_OI.float() * scale_O1

"""Round weights to int8, for actors of a run that declares int8: QuaRL (arXiv:1910.01055), weights only.

The local engine calls this when it loads a policy as int8. Products stay in float32, so an actor and its verifier agree
as closely as two float32 engines. This decides which policy samples; it gains no speed here. It deals with neither
activations nor files.

Axes: O outputs, I inputs of a matrix.
"""

import torch

from shoal.policy.model import Transformer

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


def quantised(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as int8[O, I], and the scale of each output, float32[O, 1]. An output of zeros has scale 1."""
    scale_O1 = weight_OI.float().abs().amax(-1, keepdim=True) / LARGEST
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, torch.ones_like(scale_O1))
    return (weight_OI.float() / scale_O1).round().clamp_(-LARGEST, LARGEST).to(torch.int8), scale_O1


def dequantised(values_OI: torch.Tensor, scale_O1: torch.Tensor) -> torch.Tensor:
    """The float32 matrix for the products."""
    return values_OI.float() * scale_O1

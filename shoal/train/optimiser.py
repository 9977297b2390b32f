"""The optimiser of a training step: AdamW over a module's parameters or over their masters.

Called by `train/step`, which computes gradients and does not know whether there are masters.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.config import TrainConfig
from shoal.train.masters import Masters


class Moments(Protocol):
    """The moments of named weights, in one form."""

    def step(self, lr: float) -> None:
        """One AdamW step of the weights, by their `grad`."""
        ...

    def of(self, name: str) -> dict[str, Tensor]:
        """The moments of one weight, by the name of each kind: not copies."""
        ...

    def count(self, updates: int) -> None:
        """So many steps were taken before."""
        ...


class Optimiser:
    """AdamW (arXiv:1711.05101) that decays only matrices."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        for parameter in parameters.values():
            # Copy into torch's own allocation: weights read from a file may be at odd addresses, and MKL's sums depend on
            # alignment, so a resumed run would differ in the last bit.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        coarse = any(parameter.dtype != torch.float32 for parameter in parameters.values())
        self._max_grad_norm = config.max_grad_norm
        self._parameters = parameters
        self._masters = Masters(parameters) if coarse else None
        self._learned = self._masters.tensors if self._masters else parameters
        self._moments: Moments = FloatMoments(self._learned, config)

    def update(self, lr: float) -> float:
        """Clip the gradient, take one step unless it is not finite, and drop it. Returns its norm before clipping."""
        if self._masters:
            self._masters.collect()
        norm = torch.nn.utils.clip_grad_norm_(self._learned.values(), self._max_grad_norm).item()
        if math.isfinite(norm):
            self._moments.step(lr)
            if self._masters:
                self._masters.write_back()
        self.drop()
        return norm

    def drop(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._masters:
            self._masters.drop()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name: its own tensors, not copies."""
        tensors = {}
        for name, weight in self._learned.items():
            tensors[f"weights/{name}"] = weight.data
            tensors |= {f"{kind}/{name}": moments for kind, moments in self._moments.of(name).items()}
        return tensors

    def resume(self, updates: int) -> None:
        """Go on after so many steps: `tensors` were replaced."""
        self._moments.count(updates)
        if self._masters:
            self._masters.write_back()


class FloatMoments:
    """Moments in float32, with torch's fused step. They are made at the start, so that a state is always complete."""

    def __init__(self, weights: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        self._weights = weights
        matrices = [p for p in weights.values() if p.ndim >= 2]
        vectors = [p for p in weights.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
        for weight in weights.values():
            self._adamw.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    def step(self, lr: float) -> None:
        """See `Moments`."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def of(self, name: str) -> dict[str, Tensor]:
        """See `Moments`."""
        held = self._adamw.state[self._weights[name]]
        return {"adam.m": held["exp_avg"], "adam.v": held["exp_avg_sq"]}

    def count(self, updates: int) -> None:
        """See `Moments`."""
        for held in self._adamw.state.values():
            held["step"].fill_(float(updates))

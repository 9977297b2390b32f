"""The optimiser of a training step: AdamW over a module's parameters or over their masters, with the moments asked for.

All forms take the same steps, up to the rounding of 8-bit moments. What it holds for each parameter during a step, in
bytes:

    dtype      moments     module  master  moments  gradient
    ""         float32          4       -        8         4
    ""         8bit             4       -        2         4
    bfloat16   float32          2       4        8         4
    bfloat16   8bit             2       4        2         4

With `offloaded`, master and moments are on the CPU if the module is on another device. If the module is on the CPU, this is
the same as float32.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shoal.config import TrainConfig
from shoal.train.adamw8 import BLOCK, EightBitValues, Moments8, adamw8, no_moments
from shoal.train.distributed.ranks import ALONE, Ranks
from shoal.train.master_weights import MasterWeights

CPU = torch.device("cpu")

PIECE_VALUES = 1 << 20
"""Values of a matrix whose 8-bit moments exist as float32 at a time: a few MB each. A multiple of BLOCK."""


_adamw = partial(adamw, fused=True, amsgrad=False, maximize=False, eps=1e-8)


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

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, ranks: Ranks = ALONE) -> None:
        ranks.settle(parameters)
        offloaded = config.moments == "offloaded"
        elsewhere = offloaded and any(parameter.device != CPU for parameter in parameters.values())
        coarse = any(parameter.dtype != torch.float32 for parameter in parameters.values())
        self._max_grad_norm = config.max_grad_norm
        self._parameters, self._ranks = parameters, ranks
        self._masters = MasterWeights(parameters, CPU if offloaded else None) if coarse or elsewhere else None
        self._learned = self._masters.tensors if self._masters else parameters
        self._moments: Moments = (ByteMoments if config.moments == "8bit" else FloatMoments)(self._learned, config)

    def update(self, lr: float) -> float:
        """Clip the gradient, take one step unless it is not finite, and drop it. Returns its norm before clipping."""
        if self._masters:
            self._masters.collect()
        norm = self._ranks.whole(torch.nn.utils.clip_grad_norm_(self._learned.values(), self._max_grad_norm)).item()
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
            tensors[f"weights/{name}"] = weight.detach()
            tensors |= {f"{kind}/{name}": moments for kind, moments in self._moments.of(name).items()}
        return tensors

    def resume(self, updates: int) -> None:
        """Go on after so many steps: `tensors` were replaced."""
        self._moments.count(updates)
        if self._masters:
            self._masters.write_back()


class FloatMoments:
    """Moments in float32, with torch's fused step. They are made at the start, so that a state is always complete.

    `torch.optim.AdamW` takes the same steps, but a process that makes one imports `torch._dynamo`, for seconds."""

    def __init__(self, weights: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        self._weights, self._config = weights, config
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self._steps = {name: torch.zeros((), device=w.device) for name, w in weights.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """See `Moments`."""
        learned = {name: weight for name, weight in self._weights.items() if weight.grad is not None}
        self._step(
            {name: weight for name, weight in learned.items() if weight.ndim >= 2}, lr, self._config.weight_decay
        )
        self._step({name: weight for name, weight in learned.items() if weight.ndim < 2}, lr, 0.0)

    def _step(self, weights: Mapping[str, nn.Parameter], lr: float, decay: float) -> None:
        m, r = ([self._moments[name][kind] for name in weights] for kind in (0, 1))
        config, steps = self._config, [self._steps[name] for name in weights]
        values, gradients = list[Tensor](weights.values()), [w.grad for w in weights.values() if w.grad is not None]
        _adamw(values, gradients, m, r, [], steps, lr=lr, weight_decay=decay, beta1=config.beta1, beta2=config.beta2)

    def of(self, name: str) -> dict[str, Tensor]:
        """See `Moments`."""
        m, r = self._moments[name]
        return {"adam.m": m, "adam.v": r}

    def count(self, updates: int) -> None:
        """See `Moments`."""
        for step in self._steps.values():
            step.fill_(float(updates))


class ByteMoments:
    """Moments of matrices in 8 bits a value. Vectors are small, so theirs are float32."""

    def __init__(self, weights: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        vectors = {name: weight for name, weight in weights.items() if weight.ndim < 2}
        self._matrices = {name: weight for name, weight in weights.items() if weight.ndim >= 2}
        self._vectors = FloatMoments(vectors, config) if vectors else None
        self._held = {name: no_moments(weight.numel(), weight.device) for name, weight in self._matrices.items()}
        self._config, self._updates = config, 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """See `Moments`."""
        self._updates += 1
        if self._vectors:
            self._vectors.step(lr)
        for name, weight in self._matrices.items():
            if weight.grad is not None:
                self._step(weight.view(-1), weight.grad.reshape(-1), self._held[name], lr)

    def _step(self, theta_n: Tensor, g_n: Tensor, held: Moments8, lr: float) -> None:
        settings, betas = self._config, (self._config.beta1, self._config.beta2)
        for start in range(0, len(theta_n), PIECE_VALUES):
            piece = _piece_of(held, start)
            own_n = theta_n[start : start + PIECE_VALUES]
            new_n, moments = adamw8(
                own_n, g_n[start : start + PIECE_VALUES], piece,
                step=self._updates, lr=lr, betas=betas, decay=settings.weight_decay,
            )  # fmt: skip
            own_n.copy_(new_n)
            for before, after in zip(piece, moments, strict=True):
                before.code_n.copy_(after.code_n)
                before.a_b.copy_(after.a_b)

    def of(self, name: str) -> dict[str, Tensor]:
        """See `Moments`."""
        if name not in self._held:
            assert self._vectors is not None
            return self._vectors.of(name)
        m, r = self._held[name]
        return {"adam.m8": m.code_n, "adam.m8.scales": m.a_b, "adam.r8": r.code_n, "adam.r8.scales": r.a_b}

    def count(self, updates: int) -> None:
        """See `Moments`."""
        self._updates = updates
        if self._vectors:
            self._vectors.count(updates)


def _piece_of(held: Moments8, start: int) -> Moments8:
    """The moments of a piece: views of those of the whole matrix."""
    values = slice(start, start + PIECE_VALUES)
    blocks = slice(start // BLOCK, (start + PIECE_VALUES) // BLOCK)
    m, r = (EightBitValues(each.code_n[values], each.a_b[blocks]) for each in held)
    return Moments8(m, r)

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
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shoal.config import TrainConfig
from shoal.train.distributed.ranks import ALONE, Ranks
from shoal.train.master_weights import MasterWeights

CPU = torch.device("cpu")

BLOCK = 256
"""Values that share a scale."""

DECADES = 7
"""Powers of ten that a table reaches down to."""

PIECE_VALUES = 1 << 20
"""Values of a matrix whose 8-bit moments exist as float32 at a time: a few MB each. A multiple of BLOCK."""


EPS = 1e-8

_adamw = partial(adamw, fused=True, amsgrad=False, maximize=False, eps=EPS)


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


class EightBitValues(NamedTuple):
    """Values in 8 bits."""

    code_n: Tensor
    """uint8."""
    a_b: Tensor
    """float32."""


class Moments8(NamedTuple):
    """The moments of a piece."""

    m: EightBitValues
    r: EightBitValues


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


# --- AdamW with moments in 8 bits ---
#
# Blockwise dynamic quantisation (arXiv:2110.02861, section 2). Pure: weights, gradient and moments in; new weights and
# moments out. On one machine, the same values give the same bits: nothing is drawn, and ties go to the lower code.
#
#     symbol   meaning
#     theta    weights
#     g        gradient
#     m        mean gradient
#     r        square root of the mean squared gradient, which the paper calls v
#     a_b      largest |value| of a block
#     code     place of value / a_b in a table of 256 numbers between -1 and 1, or 0 and 1; they are dense near 0
#
# Two changes to the paper. It codes v; we code r, because v has twice the range of exponents and its small values would
# all become 0 beside a block's largest. And a positive r is never coded as 0: a weight with a mean gradient but without a
# denominator would take a step of m / eps.
#
# Axes: n values of a piece, b blocks of it, B = 256 values of a block.


def no_moments(n: int, device: torch.device) -> Moments8:
    """Of weights that took no step yet: all zero."""

    def zeros(signed: bool) -> EightBitValues:
        code_n = torch.full((n,), zero_code(signed), dtype=torch.uint8, device=device)
        return EightBitValues(code_n, torch.zeros(-(-n // BLOCK), device=device))

    return Moments8(zeros(signed=True), zeros(signed=False))


def adamw8(
    theta_n: Tensor, g_n: Tensor, moments: Moments8, *, step: int, lr: float, betas: tuple[float, float], decay: float
) -> tuple[Tensor, Moments8]:
    """One step of AdamW (arXiv:1711.05101, algorithm 2); `step` counts from 1. The step uses the moments before they are
    coded."""
    beta1, beta2 = betas
    m_n = decoded(moments.m, signed=True).mul_(beta1).add_(g_n, alpha=1 - beta1)
    v_n = decoded(moments.r, signed=False).square_().mul_(beta2).addcmul_(g_n, g_n, value=1 - beta2)
    r_n = v_n.sqrt_()
    denominator_n = (r_n / (1 - beta2**step) ** 0.5).add_(EPS)
    new_n = (theta_n * (1 - lr * decay)).addcdiv_(m_n, denominator_n, value=-lr / (1 - beta1**step))
    return new_n, Moments8(coded(m_n, signed=True), coded(r_n, signed=False))


def coded(value_n: Tensor, *, signed: bool) -> EightBitValues:
    """Each value as its nearest code, of two as near the lower; without a sign, a positive value is at least code 1."""
    value_bB = F.pad(value_n, (0, -len(value_n) % BLOCK)).view(-1, BLOCK)
    a_b = value_bB.abs().amax(1)
    share_bB = value_bB / torch.where(a_b > 0, a_b, 1.0)[:, None]
    code_n = _nearest(share_bB.view(-1)[: len(value_n)], signed)
    if not signed:
        code_n = torch.maximum(code_n, (value_n > 0).to(torch.uint8))  # guard: no-vanished-denominator
    return EightBitValues(code_n, a_b)


def _nearest(share_n: Tensor, signed: bool) -> Tensor:
    """The code of the nearest number. A binary search in the table takes ten times as long as two look-ups."""
    between, lowest = _between(signed, share_n.device), _lowest(signed, share_n.device)
    code_n = lowest.index_select(0, (share_n.view(torch.int32) >> 16) & 0xFFFF)
    return code_n.add_(share_n > between.index_select(0, code_n)).to(torch.uint8)


def decoded(values: EightBitValues, *, signed: bool) -> Tensor:
    """The float32 values, [n], of codes."""
    n = len(values.code_n)
    share_n = _table(signed, values.code_n.device).index_select(0, values.code_n.int())
    return (F.pad(share_n, (0, -n % BLOCK)).view(-1, BLOCK) * values.a_b[:, None]).view(-1)[:n]


def zero_code(signed: bool) -> int:
    """The code of 0."""
    return numbers(signed).index(0.0)


@cache
def numbers(signed: bool) -> tuple[float, ...]:
    """The 256 numbers of a table, ascending (arXiv:1511.04561, section 2.1).

    They are 0, 1 and, for each power of ten from 1e-6 to 1, the middles of equal parts of [0.1, 1] times it. Each power has
    twice as many parts as the one below. With signs, it has half as many parts, and each middle also with a minus.
    """
    found = [Fraction(0), Fraction(1)]
    for place in range(DECADES):
        parts, power = 2 ** (place + (not signed)), Fraction(10) ** (place - DECADES + 1)
        middles = [power * (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * i + 1, 2 * parts)) for i in range(parts)]
        found += middles + [-middle for middle in middles] * signed
    return tuple(float(number) for number in sorted(found))


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(numbers(signed), dtype=torch.float32, device=device)


@cache
def _between(signed: bool, device: torch.device) -> Tensor:
    """Where one code ends and the next begins: the middles between neighbours, [255]."""
    table = torch.tensor(numbers(signed), dtype=torch.float64)
    return ((table[:-1] + table[1:]) / 2).to(device, torch.float32)


@cache
def _lowest(signed: bool, device: torch.device) -> Tensor:
    """By the upper 16 bits of a float32: the code of the lowest value that has them, int32[65536]. The codes of all values
    that have them are this one and the next."""
    bits = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.where(
        bits < 1 << 31, bits, (bits | 0xFFFF) - (1 << 32)
    )  # a larger number lies lower if it is negative
    lowest = torch.bucketize(bits.to(torch.int32).view(torch.float32), _between(signed, torch.device("cpu")))
    return lowest.clamp_(max=254).to(device, torch.int32)


# --- Learning rate of a step ---
#
#     symbol   meaning
#     t        the step, counted from 0
#     W        warm-up steps:   lr(t) = peak (t + 1) / W for t < W, so that the first step already moves
#     x        progress after warm-up, 0 at step W and 1 at the last:   x = (t - W) / (steps - 1 - W)
#
#     linear   peak (1 - 0.9 x)
#     cosine   peak (0.1 + 0.9 (1 + cos(pi x)) / 2)        SGDR, arXiv:1608.03983, eq. 5, down to a tenth


FINAL_SHARE = 0.1
"""Linear and cosine schedules end at this share of the peak, because late RL steps still learn something."""


def learning_rate(t: int, config: TrainConfig, *, peak: float, steps: int) -> float:
    """lr(t). Steps after the last keep its value, so that a run can be extended."""
    if t < config.warmup_steps:
        return peak * (t + 1) / config.warmup_steps
    x = min(1.0, (t - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    if config.schedule == "linear":
        return peak * (1 - (1 - FINAL_SHARE) * x)
    if config.schedule == "cosine":
        return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * x)) / 2)
    return peak

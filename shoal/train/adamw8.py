"""AdamW with its moments in 8 bits a value: blockwise dynamic quantisation (arXiv:2110.02861, section 2).

Pure: weights, gradient and moments in; new weights and moments out. On one machine, the same values give the same bits:
nothing is drawn, and ties go to the lower code.

    symbol   meaning
    theta    weights
    g        gradient
    m        mean gradient
    r        square root of the mean squared gradient, which the paper calls v
    a_b      largest |value| of a block
    code     place of value / a_b in a table of 256 numbers between -1 and 1, or 0 and 1; they are dense near 0

Two changes to the paper. It codes v; we code r, because v has twice the range of exponents and its small values would all
become 0 beside a block's largest. And a positive r is never coded as 0: a weight with a mean gradient but without a
denominator would take a step of m / eps.

Axes: n values of a piece, b blocks of it, B = 256 values of a block.
"""

from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Values that share a scale."""

DECADES = 7
"""Powers of ten that a table reaches down to."""


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


def no_moments(n: int, device: torch.device) -> Moments8:
    """Of weights that took no step yet: all zero."""

    def zeros(signed: bool) -> EightBitValues:
        code_n = torch.full((n,), zero_code(signed), dtype=torch.uint8, device=device)
        return EightBitValues(code_n, torch.zeros(-(-n // BLOCK), device=device))

    return Moments8(zeros(signed=True), zeros(signed=False))


def adamw8(
    theta_n: Tensor, g_n: Tensor, moments: Moments8, *, step: int, lr: float, betas: tuple[float, float], decay: float,
    eps: float = 1e-8,
) -> tuple[Tensor, Moments8]:  # fmt: skip
    """One step of AdamW (arXiv:1711.05101, algorithm 2); `step` counts from 1. The step uses the moments before they are
    coded."""
    beta1, beta2 = betas
    m_n = decoded(moments.m, signed=True).mul_(beta1).add_(g_n, alpha=1 - beta1)
    v_n = decoded(moments.r, signed=False).square_().mul_(beta2).addcmul_(g_n, g_n, value=1 - beta2)
    r_n = v_n.sqrt_()
    denominator_n = (r_n / (1 - beta2**step) ** 0.5).add_(eps)
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

"""NF4: weights of a frozen base in 4 bits a value, as quantiles of a normal distribution (QLoRA, arXiv:2305.14314).

Called by `policy/nf4files`, which codes the base of adapters once, and by `policy/frozen`, which decodes it at each use.
Pure: values in, codes out, and back. Decoding takes single operations of float32, which round alike everywhere, so codes
give the same weights on every machine. Coding takes a mean, whose sum may not: so codes are published, once.

    symbol   meaning
    w        weights, about normally distributed around 0
    q        16 numbers between -1 and 1 with about as many weights near each; one is 0 (eq. 4)
    c_b      largest |weight| of a block, which the paper calls a quantisation constant
    code     place of the number nearest to w / c_b
    c2_g     the same of c_b, less their mean, for double quantisation

A code has 4 bits, two to a byte; with float32 constants a weight takes 4.5 bits, with double quantisation 4.127.

Changed from the paper: constants are coded linearly in int8, where the paper takes 8-bit floats. Of normal weights, c_b are
all of about the same size, so a float's range is of no use.

Axes: n weights, b blocks of them, B = 64 weights of a block, g groups of blocks, G = 256 blocks of a group.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK, GROUP = 64, 256
"""Weights that share a constant; constants that share one."""

LARGEST = 127
"""Largest int8 value of a constant. -128 is not used."""

NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""q (appendix E). Eight quantiles above 0 and seven below it, at equal distances of probability, divided by the last. The
outermost are not at 0 and 1, where they are infinite: the mean of 1/32 and 1/30 is left on each side."""


class Nf4(NamedTuple):
    """Weights in 4 bits."""

    pairs: Tensor
    """uint8, [n / 2] rounded up: the code of an even place in the lower half."""
    c_b: Tensor
    """float32."""
    n: int


class Constants8(NamedTuple):
    """The constants of blocks in 8 bits."""

    code_b: Tensor
    """int8."""
    c2_g: Tensor
    """float32."""
    mean: Tensor
    """float32, [1]."""


def coded(w_n: Tensor) -> Nf4:
    """Each weight as its nearest number, of two as near the lower. A block of zeros stays zero."""
    n = len(w_n)
    w_bB = F.pad(w_n.float(), (0, -n % BLOCK)).view(-1, BLOCK)
    c_b = w_bB.abs().amax(1)
    share_bB = w_bB / torch.where(c_b > 0, c_b, 1.0)[:, None]
    code_n = torch.bucketize(share_bB.view(-1)[:n], _between(w_n.device)).to(torch.uint8)
    low, high = F.pad(code_n, (0, n % 2)).view(-1, 2).unbind(1)
    return Nf4(low | high << 4, c_b, n)


def decoded(weights: Nf4) -> Tensor:
    """The float32 weights, [n], of codes."""
    # Both numbers of a byte are looked up at once, as the 64 bits that they take.
    both_p = _numbers_of_bytes(weights.pairs.device).index_select(0, weights.pairs.int())
    share_n = both_p.view(torch.float32)[: weights.n]
    share_bB = F.pad(share_n, (0, -weights.n % BLOCK)).view(-1, BLOCK) if weights.n % BLOCK else share_n.view(-1, BLOCK)
    return share_bB.mul_(weights.c_b[:, None]).view(-1)[: weights.n]


def constants_coded(c_b: Tensor) -> Constants8:
    """Double quantisation: constants in 8 bits. Their mean is taken off first, because all are positive."""
    mean = c_b.mean(0, keepdim=True)
    rest_gG = F.pad(c_b - mean, (0, -len(c_b) % GROUP)).view(-1, GROUP)
    c2_g = rest_gG.abs().amax(1) / LARGEST
    code_gG = (rest_gG / torch.where(c2_g > 0, c2_g, 1.0)[:, None]).round().clamp_(-LARGEST, LARGEST)
    return Constants8(code_gG.view(-1)[: len(c_b)].to(torch.int8), c2_g, mean)


def constants_decoded(constants: Constants8) -> Tensor:
    """The float32 constants, [b], of codes."""
    b = len(constants.code_b)
    rest_gG = F.pad(constants.code_b.float(), (0, -b % GROUP)).view(-1, GROUP) * constants.c2_g[:, None]
    return rest_gG.view(-1)[:b] + constants.mean


@cache
def _numbers_of_bytes(device: torch.device) -> Tensor:
    """Two numbers for each byte of codes, in the bits of one int64, [256]."""
    table, byte = torch.tensor(NUMBERS, dtype=torch.float32), torch.arange(256)
    return torch.stack([table[byte & 15], table[byte >> 4]], 1).view(torch.int64).view(-1).to(device)


@cache
def _between(device: torch.device) -> Tensor:
    """Where one code ends and the next begins: the middles between neighbours, [15]."""
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    return ((table[:-1] + table[1:]) / 2).to(device, torch.float32)

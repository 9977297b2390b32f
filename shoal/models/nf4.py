"""NF4: 4-bit weights of a frozen base, as quantiles of a normal distribution (QLoRA, arXiv:2305.14314), and their products.

Decoding takes single operations of float32, which round alike everywhere, so codes give the same weights on every machine.
Coding takes a mean, whose sum may not: so codes are published, once.

    symbol   meaning
    w        weights, about normally distributed around 0
    q        16 numbers between -1 and 1 with about as many weights near each; one is 0 (eq. 4)
    c_b      largest |weight| of a block, which the paper calls a quantisation constant
    code     place of the number nearest to w / c_b
    c2_g     the same of c_b, less their mean, for double quantisation

A code has 4 bits, two to a byte; with float32 constants a weight takes 4.5 bits, with double quantisation 4.127.

Changed from the paper: constants are coded linearly in int8, where the paper takes 8-bit floats. Of normal weights, c_b are
all of about the same size, so a float's range is of no use.

Axes: n weights, b blocks of them, B = 64 weights of a block, g groups of blocks, G = 256 blocks of a group. Of products:
N rows of inputs, I inputs, O outputs of a matrix in its file, P pairs of codes, X outputs of several matrices side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.nf4_layout import BLOCK, GROUP, decoded_values

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


CODE_DTYPES = {"U8": torch.uint8, "I8": torch.int8, "F32": torch.float32}
"""By safetensors' names: those of the tensors that a matrix consists of."""


class Codes(NamedTuple):
    """A matrix in NF4, with the constants of each output after the other. What the policy is, are the decoded weights, in
    the dtype that the base has beside its codes: every node decodes the same, whatever it computes in."""

    pairs_OP: Tensor
    """uint8: of two inputs each, the first in the lower half."""
    constants_Ob: Tensor
    """int8."""
    scales_g: Tensor
    """float32."""
    mean_1: Tensor
    """float32."""
    kept: torch.dtype
    """What a decoded weight is rounded to: float32 or bfloat16."""

    @property
    def outputs(self) -> int:
        return len(self.pairs_OP)

    @property
    def inputs(self) -> int:
        return 2 * self.pairs_OP.shape[1]

    def constants(self) -> Tensor:
        """The float32 constants, [O, b]."""
        flat = constants_decoded(Constants8(self.constants_Ob.view(-1), self.scales_g, self.mean_1))
        return flat.view(self.outputs, -1)

    def rows(self, constants_Ob: Tensor, start: int, end: int) -> Tensor:
        """The decoded weights of some outputs, [O, I]."""
        pairs, c_b = self.pairs_OP[start:end].reshape(-1), constants_Ob[start:end].reshape(-1)
        return decoded(Nf4(pairs, c_b, 2 * len(pairs))).view(end - start, -1).to(self.kept)

    def whole(self) -> Tensor:
        """All decoded weights, [O, I]."""
        return self.rows(self.constants(), 0, self.outputs)


@dataclass(frozen=True, eq=False)
class Nf4Matrix:
    """Matrices side by side as codes, which never learn (eq. 5): a `layers.Matrix`. A product decodes some outputs at a
    time and forgets them. So does the backward pass, which needs the matrix for the gradient of the inputs."""

    parts: Sequence[Codes]
    dtype: torch.dtype
    """In which it multiplies."""
    norm_I: Tensor | None = None
    """What inputs are multiplied by, as `model.scaled` does it."""
    columns_X: Tensor | None = None
    """The column of each output; None: they stay in order."""

    def product(self, x_NI: Tensor, added: Tensor | None = None) -> Tensor:
        """x @ matrix, [N, X], to which something of this shape, or a bias, is added."""
        if torch.is_grad_enabled():
            return _Product.apply(x_NI, added, self)
        return self.multiplied(x_NI, added)

    def contiguous(self) -> "Nf4Matrix":
        """Itself: codes have one layout."""
        return self

    def multiplied(self, x_NI: Tensor, added: Tensor | None) -> Tensor:
        """As `product`, without gradients."""
        product_NX = x_NI.new_empty(len(x_NI), sum(part.outputs for part in self.parts))
        if added is not None:
            product_NX.copy_(added)
        for columns, weight_OI in self.blocks():
            if added is None:
                product_NX[:, columns] = torch.mm(x_NI, weight_OI.t())
            else:
                product_NX[:, columns] = torch.addmm(product_NX[:, columns], x_NI, weight_OI.t())
        return product_NX

    def blocks(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Some decoded outputs at a time, [O, I], with their columns. Their bits are those of the same outputs of a plain
        matrix that was arranged."""
        column = 0
        for part in self.parts:
            constants_Ob = part.constants()
            step = max(1, decoded_values(part.pairs_OP.device.type) // part.inputs)
            for start in range(0, part.outputs, step):
                end = min(start + step, part.outputs)
                weight_OI = part.rows(constants_Ob, start, end).to(self.dtype)
                if self.norm_I is not None:
                    weight_OI = (weight_OI * self.norm_I).to(self.dtype)
                place = slice(column + start, column + end)
                yield place if self.columns_X is None else self.columns_X[place], weight_OI
            column += part.outputs


class _Product(torch.autograd.Function):
    """dx = dy @ matrix.t(), decoded once more. It is summed over blocks in at least float32."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, added: Tensor | None, matrix: Nf4Matrix) -> Tensor:
        ctx.matrix = matrix
        return matrix.multiplied(x_NI, added)

    @staticmethod
    def backward(ctx: Any, dy_NX: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_x, needs_added, _ = ctx.needs_input_grad
        dx_NI = None
        if needs_x:
            wide = torch.promote_types(dy_NX.dtype, torch.float32)
            sum_NI = dy_NX.new_zeros(len(dy_NX), ctx.matrix.parts[0].inputs, dtype=wide)
            for columns, weight_OI in ctx.matrix.blocks():
                sum_NI += torch.mm(dy_NX[:, columns], weight_OI)
            dx_NI = sum_NI.to(dy_NX.dtype)
        return dx_NI, dy_NX if needs_added else None, None

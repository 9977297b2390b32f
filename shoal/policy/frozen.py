"""Matrices of a frozen base that are kept as NF4 codes, also while they are multiplied: QLoRA (arXiv:2305.14314 eq. 5).

Made by `model`, which has the codes; `layers` multiplies by them, with gradients and without. A product decodes some
outputs at a time and forgets them. So does the backward pass, which needs the matrix for the gradient of the inputs; the
codes never learn. It does not deal with files, for which there is `nf4files`.

What the policy is, are the decoded weights: a number times a constant in float32, rounded to the dtype that the base has
beside its codes. Every node decodes the same, whatever it computes in.

Axes: N rows of inputs, I inputs, O outputs of a matrix in its file, P pairs of codes, b constants, g scales of constants,
X outputs of several matrices side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.algos.nf4 import Constants8, Nf4, constants_decoded, decoded
from shoal.policy.nf4spec import decoded_values

CODE_DTYPES = {"U8": torch.uint8, "I8": torch.int8, "F32": torch.float32}
"""By safetensors' names: those of the tensors that a matrix consists of."""


class Codes(NamedTuple):
    """A matrix in NF4, with the constants of each output after the other."""

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
class Frozen:
    """Matrices side by side, as `layers` has a matrix: [inputs, outputs]."""

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
            result: Tensor = _Product.apply(x_NI, added, self)
            return result
        return self.multiplied(x_NI, added)

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
    def forward(ctx: Any, x_NI: Tensor, added: Tensor | None, matrix: Frozen) -> Tensor:
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

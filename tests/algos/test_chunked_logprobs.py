"""Log-probabilities, entropies and gradients in pieces equal those of all logits, and the logits are never whole."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.algos.chunked_logprobs import logprob_and_entropy_of
from shoal.algos.regularisers import logprob_and_entropy

N, D, V = 37, 16, 50
PIECE = 4 * V
"""So many logits at a time are those of four tokens; the last piece has one."""


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    head_VD = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    return hidden_ND, head_VD, torch.randint(0, V, (N,), generator=generator)


def _loss(logp_N: Tensor, H_N: Tensor) -> Tensor:
    """A loss in which every token weighs differently, and which is not linear in log p."""
    weight_N = torch.linspace(-1, 2, N, dtype=logp_N.dtype)
    return (weight_N * (logp_N / 3).exp()).sum() - 0.3 * (weight_N * H_N).sum()


def _both(dtype: torch.dtype, temperature: float, held_values: int) -> list[list[Tensor]]:
    """Log-probs, entropies and gradients: in pieces, and from all logits by plain autograd."""
    results = []
    for in_pieces in (True, False):
        hidden_ND, head_VD, o_N = _inputs(dtype)
        if in_pieces:
            logp_N, H_N = logprob_and_entropy_of(
                hidden_ND, head_VD, o_N, temperature=temperature, held_values=held_values
            )
        else:
            wide = torch.promote_types(dtype, torch.float32)
            all_NV = ((hidden_ND @ head_VD.t()).to(wide) / temperature).log_softmax(-1)
            logp_N, H_N = all_NV.gather(-1, o_N[:, None]).squeeze(-1), -(all_NV.exp() * all_NV).sum(-1)
        gradients = torch.autograd.grad(_loss(logp_N, H_N), (hidden_ND, head_VD))
        results.append([logp_N.detach(), H_N.detach(), *gradients])
    return results


@pytest.mark.parametrize("held_values", [1, PIECE, 36 * V])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.03)])
def test_pieces_give_the_figures_and_gradients_of_all_logits(
    dtype: torch.dtype, bound: float, held_values: int
) -> None:
    for ours, plain in zip(*_both(dtype, 0.7, held_values), strict=True):
        assert ours.dtype == plain.dtype and ours.shape == plain.shape
        assert (ours.double() - plain.double()).abs().max() <= bound * (1 + plain.abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_that_fit_give_the_bits_of_the_plain_way(temperature: float) -> None:
    hidden_ND, head_VD, o_N = _inputs()
    logits_NV = torch.nn.functional.linear(hidden_ND, head_VD).float()
    plain = logprob_and_entropy(logits_NV if temperature == 1.0 else logits_NV / temperature, o_N)
    ours = logprob_and_entropy_of(hidden_ND, head_VD, o_N, temperature=temperature, held_values=N * V)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    for a, b in zip(*(torch.autograd.grad(_loss(*both), (hidden_ND, head_VD)) for both in (ours, plain)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_side_gets_no_gradient_and_changes_nothing_of_the_other(frozen: str) -> None:
    hidden_ND, head_VD, o_N = _inputs()
    (hidden_ND if frozen == "hidden" else head_VD).requires_grad_(False)
    figures = logprob_and_entropy_of(hidden_ND, head_VD, o_N, temperature=1.0, held_values=PIECE)
    _loss(*figures).backward()
    both = _both(torch.float32, 1.0, PIECE)[0][2:]
    assert (hidden_ND.grad is None) == (frozen == "hidden") and (head_VD.grad is None) == (frozen == "head")
    grad = head_VD.grad if frozen == "hidden" else hidden_ND.grad
    assert grad is not None and torch.equal(grad, both[frozen == "hidden"])


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in values."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("learn", [True, False])
def test_logits_of_all_tokens_never_exist(learn: bool) -> None:
    hidden_ND, head_VD, o_N = _inputs()
    with _Largest() as largest, torch.set_grad_enabled(learn):
        figures = logprob_and_entropy_of(hidden_ND, head_VD, o_N, temperature=0.7, held_values=PIECE)
        if learn:
            _loss(*figures).backward()
    assert PIECE <= largest.values == V * D < N * V  # the head itself

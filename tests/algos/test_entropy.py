"""Log-probability and entropy in one pass, against numbers worked by hand and against the slow way."""

import math

import pytest
import torch

from shoal.algos.regularisers import entropy_bonus, logprob_and_entropy


def test_values_equal_the_numbers_worked_by_hand():
    # logits (0, ln 3): p = (1/4, 3/4); H = 1/4 ln 4 + 3/4 ln 4/3 = 2 ln 2 - 3/4 ln 3
    z_NV = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
    logp_N, H_N = logprob_and_entropy(z_NV, torch.tensor([1, 0]))
    assert logp_N.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    assert H_N.tolist() == pytest.approx([2 * math.log(2) - 0.75 * math.log(3), math.log(2)])


def test_gradients_match_finite_differences():
    z_NV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    o_N = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda z: logprob_and_entropy(z, o_N), (z_NV,))


def test_gradients_match_those_of_plain_autograd():
    z_NV = torch.randn(9, 11, generator=torch.Generator().manual_seed(1)).mul_(4).requires_grad_()
    o_N = torch.arange(9)
    logp_N, H_N = logprob_and_entropy(z_NV, o_N)
    (fast_NV,) = torch.autograd.grad((logp_N * 2 - 0.3 * H_N).sum(), z_NV)
    plain_NV = torch.log_softmax(z_NV, -1)
    slow = 2 * plain_NV.gather(-1, o_N[:, None]).sum() + 0.3 * (plain_NV.exp() * plain_NV).sum()
    (slow_NV,) = torch.autograd.grad(slow, z_NV)
    torch.testing.assert_close(fast_NV, slow_NV, atol=1e-6, rtol=1e-5)


def test_bonus_is_weight_times_mean_entropy_of_the_whole_batch():
    # -0.1 * (1 * 0.5 + 2 * 1.5) / 7 = -0.05
    H_N, weight_N = torch.tensor([0.5, 1.5]), torch.tensor([1.0, 2.0])
    assert entropy_bonus(H_N, weight_N, beta=0.1, num_tokens=7).item() == pytest.approx(-0.05)

"""Truncated importance weights against numbers worked by hand, and the gradient of a loss that has them."""

import math

import pytest
import torch

from shoal.algos.corrections import truncated_weights
from shoal.algos.losses import ppo_loss


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_weights_are_ratios_up_to_the_largest():
    # pi_old / mu: 0.2 / 0.4 = 0.5;  0.3 / 0.3 = 1;  0.6 / 0.4 = 1.5;  0.8 / 0.2 = 4, cut to 2.
    w_N, cut_N = truncated_weights(logs(0.2, 0.3, 0.6, 0.8), logs(0.4, 0.3, 0.4, 0.2), C=2.0)
    assert w_N.tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert cut_N.tolist() == [False, False, False, True]


def test_weighted_tokens_of_the_sampler_have_the_mean_of_the_learner():
    # mu = (0.5, 0.3, 0.2), pi = (0.4, 0.4, 0.2), f = (1, 2, 4): E_pi f = 0.4 + 0.8 + 0.8 = 2 = E_mu (pi / mu) f.
    mu_3, f_3 = logs(0.5, 0.3, 0.2), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    w_3, _ = truncated_weights(logs(0.4, 0.4, 0.2), mu_3, C=2.0)
    assert (mu_3.exp() * w_3 * f_3).sum().item() == pytest.approx(2.0)


def test_a_largest_weight_of_1_only_lowers():
    w_N, cut_N = truncated_weights(logs(0.5, 0.1), logs(0.25, 0.2), C=1.0)
    assert w_N.tolist() == pytest.approx([1.0, 0.5]) and cut_N.tolist() == [True, False]


@pytest.mark.parametrize("claimed_nats", [-1e30, 0.0, 1e30])
def test_absurd_claims_give_finite_weights_within_the_bound(claimed_nats):
    (w,) = truncated_weights(torch.tensor([-3.0]), torch.tensor([claimed_nats]), C=2.0).w_N.tolist()
    assert 0 <= w <= 2.0 and math.isfinite(w)


def test_no_gradient_flows_through_a_weight():
    logp_N = logs(0.2, 0.8).requires_grad_()
    assert not truncated_weights(logp_N, logs(0.5, 0.1), C=2.0).w_N.requires_grad


def test_the_gradient_of_a_weighted_loss_matches_finite_differences():
    generator = torch.Generator().manual_seed(5)
    old_N = -torch.rand(64, generator=generator, dtype=torch.float64) * 3
    mu_N = old_N + 0.5 * torch.randn(64, generator=generator, dtype=torch.float64)
    logp_N = (old_N + 0.3 * torch.randn(64, generator=generator, dtype=torch.float64)).requires_grad_()
    A_N = torch.randn(64, generator=generator, dtype=torch.float64)

    def loss(logp_N: torch.Tensor) -> torch.Tensor:
        w_N, cut_N = truncated_weights(old_N, mu_N, C=1.5)
        assert cut_N.any() and not cut_N.all()
        return (w_N * ppo_loss(logp_N, old_N, A_N, eps_low=0.2, eps_high=0.2, delta=4.0).loss_N).sum() / 64

    assert torch.autograd.gradcheck(loss, (logp_N,), eps=1e-7, atol=1e-7)
    loss(logp_N).backward()
    # By hand, where neither clip binds: -w r A / 64.
    r_N, w_N = (logp_N - old_N).exp().detach(), truncated_weights(old_N, mu_N, C=1.5).w_N
    free_N = (r_N - 1).abs() < 0.2
    assert torch.allclose(logp_N.grad[free_N], (-w_N * r_N * A_N / 64)[free_N])

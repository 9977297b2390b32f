"""KL to a reference: values and gradients by hand, and their means under the policy against the divergence itself."""

import math

import pytest
import torch

from shoal.algos.regularisers import kl_terms, rest_of_penalty


def test_estimators_equal_the_numbers_worked_by_hand():
    # rho / pi = 2 and 1/2. k1: -log 2, log 2. k2: log(2)^2 / 2. k3: 1 - log 2, -1/2 + log 2.
    logp_N = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    reference_logp_N = logp_N + torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    two = math.log(2)
    by_hand = {
        "k1": ([-two, two], [1.0, 1.0]),
        "k2": ([two**2 / 2, two**2 / 2], [-two, two]),
        "k3": ([1 - two, two - 0.5], [-1.0, 0.5]),
    }
    for estimator, (values, gradient) in by_hand.items():
        at_N = logp_N.clone().requires_grad_()
        found_N = kl_terms(at_N, reference_logp_N, estimator)
        found_N.sum().backward()
        assert found_N.tolist() == pytest.approx(values) and at_N.grad.tolist() == pytest.approx(gradient)


@pytest.fixture
def policies():
    """Logits of a policy over five letters, and the log-probs of a reference."""
    generator = torch.Generator().manual_seed(2)
    z_V = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    return z_V, torch.log_softmax(torch.randn(5, generator=generator, dtype=torch.float64), 0)


def divergence(one_V, other_V):
    return (one_V.exp() * (one_V - other_V)).sum()


def gradient(value, z_V):
    return torch.autograd.grad(value, z_V, retain_graph=True)[0]


def test_the_mean_of_k1_and_k3_is_the_divergence(policies):
    z_V, rho_V = policies
    logp_V = torch.log_softmax(z_V, 0)
    p_V, expected = logp_V.exp().detach(), divergence(logp_V, rho_V).item()
    for estimator in ("k1", "k3"):
        assert (p_V * kl_terms(logp_V, rho_V, estimator)).sum().item() == pytest.approx(expected)
    assert (p_V * kl_terms(logp_V, rho_V, "k2")).sum().item() != pytest.approx(expected, rel=1e-3)


def test_mean_gradients_in_the_loss_are_none_the_right_one_and_the_other_way_round(policies):
    z_V, rho_V = policies
    logp_V = torch.log_softmax(z_V, 0)
    p_V = logp_V.exp().detach()
    right = gradient(divergence(logp_V, rho_V), z_V)
    other = gradient(divergence(rho_V, logp_V), z_V)
    for estimator, expected in (("k1", torch.zeros(5)), ("k2", right), ("k3", other)):
        found = gradient((p_V * kl_terms(logp_V, rho_V, estimator)).sum(), z_V)
        torch.testing.assert_close(found, expected.double())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_ratio_gives_the_gradient_of_the_divergence_whoever_sampled(policies, estimator):
    z_V, rho_V = policies
    logp_V = torch.log_softmax(z_V, 0)
    mu_V = torch.log_softmax(z_V.detach().roll(1), 0)
    weighted_V = (logp_V - mu_V).exp() * kl_terms(logp_V, rho_V, estimator)
    torch.testing.assert_close(gradient((mu_V.exp() * weighted_V).sum(), z_V), gradient(divergence(logp_V, rho_V), z_V))


def test_penalties_of_a_row_are_those_of_all_that_follow():
    old_logp_N = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    reference_logp_N = torch.tensor([-2.0, -1.0, -5.0, -2.0])
    # k1: 1, -1, 2 in the first row, 1 in the second.
    found = rest_of_penalty(old_logp_N, reference_logp_N, torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == [2.0, 1.0, 2.0, 1.0]


def test_the_mean_gradient_of_row_penalties_is_that_of_the_divergence_of_rows(policies):
    """All rows of two letters, whose second letter depends on the first."""
    z_V, rho_V = policies
    step_VV = torch.stack([torch.log_softmax(z_V.roll(v) * (v + 1) / 3, 0) for v in range(5)])
    rho_VV = torch.stack([rho_V.roll(2 * v) for v in range(5)])
    first_V = torch.log_softmax(z_V, 0)
    logp_VV2 = torch.stack([first_V[:, None].expand(5, 5), step_VV], -1)
    rho_VV2 = torch.stack([rho_V[:, None].expand(5, 5), rho_VV], -1)
    row_p_VV = logp_VV2.sum(-1).exp()
    expected = gradient((row_p_VV * (logp_VV2 - rho_VV2).sum(-1)).sum(), z_V)
    rest_N = rest_of_penalty(logp_VV2.detach().flatten(), rho_VV2.flatten(), torch.arange(25).repeat_interleave(2))
    surrogate = (row_p_VV.detach()[..., None] * rest_N.view(5, 5, 2) * logp_VV2).sum()
    torch.testing.assert_close(gradient(surrogate, z_V), expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("claimed_nats", [0.0, -1e30])
def test_absurd_log_probs_leave_values_and_gradients_finite(estimator, claimed_nats):
    logp_N = torch.tensor([-500.0], requires_grad=True)
    found_N = kl_terms(logp_N, torch.tensor([claimed_nats]), estimator)
    found_N.sum().backward()
    assert torch.isfinite(found_N).all() and torch.isfinite(logp_N.grad).all()

"""KL estimates, squared ratios and entropy, against numbers worked by hand and against the slow way."""

import math

import pytest
import torch

from shoal.algos.regularisers import entropy_bonus, kl_terms, logprob_and_entropy, rest_of_penalty

# --- Log-probability and entropy in one pass ---


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


def test_bonus_is_weight_times_mean_entropy_of_the_whole_batch():
    # -0.1 * (1 * 0.5 + 2 * 1.5) / 7 = -0.05
    H_N, weight_N = torch.tensor([0.5, 1.5]), torch.tensor([1.0, 2.0])
    assert entropy_bonus(H_N, weight_N, beta=0.1, num_tokens=7).item() == pytest.approx(-0.05)


# --- KL ---


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


def test_penalties_of_a_row_are_those_of_all_that_follow():
    old_logp_N = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    reference_logp_N = torch.tensor([-2.0, -1.0, -5.0, -2.0])
    # k1: 1, -1, 2 in the first row, 1 in the second.
    found = rest_of_penalty(old_logp_N, reference_logp_N, torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == [2.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("claimed_nats", [0.0, -1e30])
def test_absurd_log_probs_leave_values_and_gradients_finite(estimator, claimed_nats):
    logp_N = torch.tensor([-500.0], requires_grad=True)
    found_N = kl_terms(logp_N, torch.tensor([claimed_nats]), estimator)
    found_N.sum().backward()
    assert torch.isfinite(found_N).all() and torch.isfinite(logp_N.grad).all()

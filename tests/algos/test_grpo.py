"""GRPO with two-sided clipping against numbers worked by hand."""

import math

import pytest
import torch

from shoal.algos.grpo import grpo_loss


def loss_of(ratios, advantages, *, eps=0.2, delta=4.0, weights=None, num_tokens=None):
    mu_logp_N = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logp_N = (mu_logp_N + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    A_N = torch.tensor(advantages, dtype=torch.float64)
    weight_N = torch.tensor(weights or [1.0] * len(ratios), dtype=torch.float64)
    terms = grpo_loss(logp_N, mu_logp_N, A_N, weight_N, eps=eps, delta=delta, num_tokens=num_tokens or len(ratios))
    terms.loss.backward()
    return terms.loss.item(), logp_N.grad.tolist(), terms.clipped_N.tolist()


def test_loss_equals_the_numbers_worked_by_hand():
    # eps = 0.2, delta = 4, six tokens; the inner objective is min(min(r, 4) A, clip(r, 0.8, 1.2) A):
    #   r = 1.0  A = +1   min( 1.0,  1.0) =  1.0
    #   r = 1.5  A = +2   min( 3.0,  2.4) =  2.4   upper clip
    #   r = 0.5  A = +1   min( 0.5,  0.8) =  0.5
    #   r = 0.5  A = -1   min(-0.5, -0.8) = -0.8   lower clip
    #   r = 2.0  A = -1   min(-2.0, -1.2) = -2.0
    #   r = 5.0  A = -1   min(-4.0, -1.2) = -4.0   delta
    # sum -2.9, loss = 2.9 / 6. Gradient by log r: -r A / 6 where nothing binds, else 0.
    loss, gradient, clipped = loss_of([1.0, 1.5, 0.5, 0.5, 2.0, 5.0], [1.0, 2.0, 1.0, -1.0, -1.0, -1.0])
    assert loss == pytest.approx(2.9 / 6)
    assert gradient == pytest.approx([-1 / 6, 0.0, -0.5 / 6, 0.0, 2.0 / 6, 0.0])
    assert clipped == [False, True, False, True, False, True]


def test_delta_binds_where_the_advantage_is_negative():
    # r = 9, A = -1: min(-4, -1.2) = -4; without delta it would be -9.
    assert loss_of([9.0], [-1.0])[0] == pytest.approx(4.0)
    assert loss_of([9.0], [-1.0], delta=math.inf)[0] == pytest.approx(9.0)


def test_delta_never_binds_where_the_advantage_is_positive():
    # r = 9, A = +1: the inner clip gives 1.2 whatever delta is.
    assert loss_of([9.0], [1.0])[0] == loss_of([9.0], [1.0], delta=math.inf)[0] == pytest.approx(-1.2)


def test_an_advantage_of_zero_is_never_counted_as_clipped():
    assert loss_of([0.1, 1.0, 9.0], [0.0, 0.0, 0.0])[2] == [False, False, False]


def test_weights_multiply_tokens_and_the_count_of_the_whole_batch_divides():
    # Two tokens of a batch of ten, r = 1: -(0.5 * 3 + 2 * -1) / 10 = 0.05.
    assert loss_of([1.0, 1.0], [3.0, -1.0], weights=[0.5, 2.0], num_tokens=10)[0] == pytest.approx(0.05)


def test_gradient_matches_finite_differences():
    generator = torch.Generator().manual_seed(3)
    mu_logp_N = -torch.rand(64, generator=generator, dtype=torch.float64) * 3
    logp_N = (mu_logp_N + torch.randn(64, generator=generator, dtype=torch.float64)).requires_grad_()
    A_N = torch.randn(64, generator=generator, dtype=torch.float64)
    weight_N = torch.rand(64, generator=generator, dtype=torch.float64)

    def loss(logp_N):
        return grpo_loss(logp_N, mu_logp_N, A_N, weight_N, eps=0.2, delta=4.0, num_tokens=100).loss

    assert torch.autograd.gradcheck(loss, (logp_N,), eps=1e-7, atol=1e-7)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("claimed_nats", [0.0, -1e30])
def test_absurd_claims_leave_loss_and_gradient_finite(advantage, claimed_nats):
    logp_N = torch.tensor([-500.0 if claimed_nats == 0.0 else -0.1], requires_grad=True)
    terms = grpo_loss(
        logp_N, torch.tensor([claimed_nats]), torch.tensor([advantage]), torch.ones(1), eps=0.2, delta=4.0, num_tokens=1
    )
    terms.loss.backward()
    assert torch.isfinite(terms.loss) and torch.isfinite(logp_N.grad).all()
    assert logp_N.grad.abs().item() <= 4.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_claimed_logprob_lifts_a_token_above_the_clip_of_its_side(advantage):
    """Whatever log-probs a worker claims, a token counts at most 1 + eps times if A > 0, and delta times if A < 0."""
    logp_N = torch.full((401,), -3.0, dtype=torch.float64, requires_grad=True)
    claimed_N = torch.linspace(-23.0, 0.0, 401, dtype=torch.float64)
    terms = grpo_loss(
        logp_N, claimed_N, torch.full_like(claimed_N, advantage), torch.ones_like(claimed_N), eps=0.2, delta=4.0,
        num_tokens=1,
    )  # fmt: skip
    terms.loss.backward()
    largest = logp_N.grad.abs().max().item()
    assert 0.8 * (1.2 if advantage > 0 else 4.0) < largest <= (1.2 if advantage > 0 else 4.0)

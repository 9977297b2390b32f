"""Every policy loss against numbers worked by hand, against finite differences, and against lies about log-probs."""

import math
from typing import get_args

import pytest
import torch

from shoal.algos.losses import row_mean, row_rest, row_sum, sft_loss
from shoal.algos.regularisers import squared_ratio
from shoal.protocol import algorithm_config as c
from shoal.protocol.algorithm_config import narrowest_bound
from shoal.train.loss import policy_loss

MU = math.log(0.25)


LOSSES = {
    "ppo": c.Clip(0.2, 0.28),
    "two_sided": c.Clip(0.2, 0.28, 3.0),
    "gspo": c.Gspo(0.2, 0.2),
    "gspo_token": c.Gspo(0.2, 0.2, by_token=True),
    "cispo": c.Cispo(0.5, 2.0),
    "dppo": c.Dppo(0.2),
    "reinforce": c.Reinforce(),
}

# Five tokens of three rows, sampled with probability 1/4; r is now / then.
R, A, ROW = [1.0, 1.5, 0.5, 2.0, 3.5], [1.0, 2.0, -1.0, -1.0, -1.0], [0, 1, 1, 2, 2]

BY_HAND = {
    # r A within [0.8, 1.28]: the token with r = 1.5 and A > 0 is above, the one with r = 0.5 and A < 0 below.
    "ppo": ([-1.0, -2.56, 0.8, 2.0, 3.5], [-1.0, 0.0, 0.0, 2.0, 3.5], [0, 1, 1, 0, 0]),
    # The same with r <= 3 where A < 0.
    "two_sided": ([-1.0, -2.56, 0.8, 2.0, 3.0], [-1.0, 0.0, 0.0, 2.0, 0.0], [0, 1, 1, 0, 1]),
    # s of the rows: 1, sqrt(0.75) = 0.8660, sqrt(7) = 2.6458. Nothing clips: s = 0.87 is inside, s = 2.6 has A < 0. The
    # gradient of s by each log p is s / 2, and it comes from both tokens: -s (2 - 1) / 2 in row 1, s (1 + 1) / 2 in row 2.
    "gspo": (
        [-1.0, -2 * 0.75**0.5, 0.75**0.5, 7**0.5, 7**0.5],
        [-1.0, -(0.75**0.5) / 2, -(0.75**0.5) / 2, 7**0.5, 7**0.5],
        [0, 0, 0, 0, 0],
    ),
    # The same values, and each token's gradient is its own: -s A.
    "gspo_token": (
        [-1.0, -2 * 0.75**0.5, 0.75**0.5, 7**0.5, 7**0.5],
        [-1.0, -2 * 0.75**0.5, 0.75**0.5, 7**0.5, 7**0.5],
        [0, 0, 0, 0, 0],
    ),
    # Weights 1, 1.5, 0.5, 2, and 3.5 cut to 2. The gradient is -weight A.
    "cispo": (
        [-w * a * math.log(r / 4) for w, a, r in zip([1.0, 1.5, 0.5, 2.0, 2.0], A, R, strict=True)],
        [-1.0, -3.0, 0.5, 2.0, 2.0], [0, 0, 0, 0, 1],
    ),
    # d = 0, 0.125, -0.125, 0.25, 0.625: the last two rose, but their advantage pushes down, so nothing is dropped.
    "dppo": ([-1.0, -3.0, 0.5, 2.0, 3.5], [-1.0, -3.0, 0.5, 2.0, 3.5], [0, 0, 0, 0, 0]),
    "reinforce": ([-a * math.log(r / 4) for a, r in zip(A, R, strict=True)], [-1.0, -2.0, 1.0, 1.0, 1.0], [0] * 5),
}  # fmt: skip


def tensors(R, A, ROW, dtype=torch.float64):
    mu_logp_N = torch.full((len(R),), MU, dtype=dtype)
    logp_N = (mu_logp_N + torch.tensor(R, dtype=dtype).log()).requires_grad_()
    return logp_N, mu_logp_N, torch.tensor(A, dtype=dtype), torch.tensor(ROW)


def test_every_loss_of_a_run_file_is_here():
    assert {type(loss) for loss in LOSSES.values()} == set(get_args(c.Loss))


@pytest.mark.parametrize("name", LOSSES)
def test_no_bound_acts_nearer_than_the_narrowest(name):
    """Else claims could reach a bound that `claims_bend_ratios` does not know of."""
    bound = narrowest_bound(c.Composition(loss=LOSSES[name], ratio_to="old"))
    near = 0.999 * min(bound, 0.9)
    R = [1 + near, 1 + near, 1 - near, 1 - near]
    found = policy_loss(LOSSES[name], *tensors(R, [1.0, -1.0, 1.0, -1.0], [0, 1, 2, 3]))
    assert bound > 0 and not found.clipped_N.any()


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_equals_the_numbers_worked_by_hand(name):
    losses, gradient, clipped = BY_HAND[name]
    logp_N, mu_logp_N, A_N, row_N = tensors(R, A, ROW)
    found = policy_loss(LOSSES[name], logp_N, mu_logp_N, A_N, row_N)
    found.loss_N.sum().backward()
    assert found.loss_N.tolist() == pytest.approx(losses)
    assert logp_N.grad.tolist() == pytest.approx(gradient)
    assert found.clipped_N.tolist() == [bool(one) for one in clipped]


def test_dppo_drops_a_token_that_moved_far_in_the_direction_of_its_advantage():
    # d = 0.5 - 0.25 = 0.25 with A > 0; 0.025 - 0.25 = -0.225 with A < 0; the same with A > 0, which pushes it back.
    logp_N, mu_logp_N, A_N, row_N = tensors([2.0, 0.1, 0.1], [1.0, -1.0, 1.0], [0, 1, 2])
    found = policy_loss(LOSSES["dppo"], logp_N, mu_logp_N, A_N, row_N)
    found.loss_N.sum().backward()
    assert found.clipped_N.tolist() == [True, True, False] and logp_N.grad.tolist() == pytest.approx([0, 0, -0.1])


def test_a_row_of_gspo_is_clipped_whole():
    # s = sqrt(1.1 * 1.9) = 1.446 > 1.2 in all its tokens, though the first token's own ratio is inside.
    logp_N, mu_logp_N, A_N, row_N = tensors([1.1, 1.9], [1.0, 1.0], [0, 0])
    found = policy_loss(LOSSES["gspo"], logp_N, mu_logp_N, A_N, row_N)
    found.loss_N.sum().backward()
    assert (
        found.clipped_N.all() and logp_N.grad.tolist() == [0, 0] and found.loss_N.tolist() == pytest.approx([-1.2] * 2)
    )


def random_case(seed, count=60):
    generator = torch.Generator().manual_seed(seed)
    mu_logp_N = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    logp_N = (mu_logp_N + torch.randn(count, generator=generator, dtype=torch.float64) * 0.6).clamp(max=-1e-3)
    A_N = torch.randn(count, generator=generator, dtype=torch.float64)
    weight_N = torch.rand(count, generator=generator, dtype=torch.float64)
    return logp_N.requires_grad_(), mu_logp_N, A_N, torch.arange(count) // 6, weight_N


@pytest.mark.parametrize("name", ["ppo", "two_sided", "gspo", "dppo", "reinforce"])
def test_gradients_match_finite_differences(name):
    logp_N, mu_logp_N, A_N, row_N, weight_N = random_case(3)

    def loss(logp_N):
        return (weight_N * policy_loss(LOSSES[name], logp_N, mu_logp_N, A_N, row_N).loss_N).sum()

    assert torch.autograd.gradcheck(loss, (logp_N,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("claimed_nats", [0.0, -1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_absurd_claims_leave_loss_and_gradient_finite(name, claimed_nats, advantage):
    logp_N = torch.tensor([-500.0 if claimed_nats == 0.0 else -0.1], requires_grad=True)
    mu_logp_N = torch.tensor([claimed_nats])
    found = policy_loss(LOSSES[name], logp_N, mu_logp_N, torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64))
    (found.loss_N.sum() + squared_ratio(logp_N, mu_logp_N).sum()).backward()
    assert torch.isfinite(found.loss_N).all() and torch.isfinite(logp_N.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_token_without_advantage_has_a_gradient_or_counts_as_clipped(name):
    logp_N, mu_logp_N, A_N, row_N = tensors(R, [0.0] * 5, ROW)
    found = policy_loss(LOSSES[name], logp_N, mu_logp_N, A_N, row_N)
    found.loss_N.sum().backward()
    assert not found.clipped_N.any() and not logp_N.grad.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_claimed_logprob_lifts_a_token_above_the_clip_of_its_side(advantage):
    """Whatever log-probs a worker claims, a token counts at most 1 + eps times if A > 0, and delta times if A < 0."""
    logp_N = torch.full((401,), -3.0, dtype=torch.float64, requires_grad=True)
    claimed_N = torch.linspace(-23.0, 0.0, 401, dtype=torch.float64)
    row_N = torch.arange(401)
    found = policy_loss(LOSSES["two_sided"], logp_N, claimed_N, torch.full_like(claimed_N, advantage), row_N)
    found.loss_N.sum().backward()
    largest, bound = logp_N.grad.abs().max().item(), 1.28 if advantage > 0 else 3.0
    assert 0.8 * bound < largest <= bound


def test_all_losses_are_the_policy_gradient_where_nothing_has_moved():
    """At r = 1 every loss has the gradient of REINFORCE; GSPO's only where a row has one advantage."""
    for loss in LOSSES.values():
        logp_N, mu_logp_N, A_N, row_N = tensors([1.0] * 4, [2.0, 2.0, -1.0, -1.0], [0, 0, 1, 1])
        policy_loss(loss, logp_N, mu_logp_N, A_N, row_N).loss_N.sum().backward()
        assert logp_N.grad.tolist() == pytest.approx([-2.0, -2.0, 1.0, 1.0])


def test_the_squared_ratio_equals_the_numbers_worked_by_hand():
    # log(e) = 1, log(1 / e^2) = -2: squares 1 and 4, gradients 2 and -4.
    logp_N, mu_logp_N, _, _ = tensors([math.e, math.exp(-2)], [0.0, 0.0], [0, 0])
    P_N = squared_ratio(logp_N, mu_logp_N)
    P_N.sum().backward()
    assert P_N.tolist() == pytest.approx([1.0, 4.0]) and logp_N.grad.tolist() == pytest.approx([2.0, -4.0])


def test_sums_over_rows_equal_the_numbers_worked_by_hand():
    x_N, row_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.tensor([0, 0, 1, 1, 1])
    assert row_sum(x_N, row_N).tolist() == [3, 3, 12, 12, 12]
    assert row_mean(x_N, row_N).tolist() == [1.5, 1.5, 4, 4, 4]
    assert row_rest(x_N, row_N).tolist() == [3, 2, 12, 9, 5]


def test_the_rest_of_a_row_has_the_same_bits_in_any_micro_batch():
    """And no operation that CUDA refuses where the same work must give the same bits, such as a running sum."""
    x_N = torch.randn(37, generator=torch.Generator().manual_seed(4))
    row_N = torch.repeat_interleave(torch.arange(4), torch.tensor([13, 1, 16, 7]))
    whole_N = row_rest(x_N, row_N)
    for row in range(4):
        own_N = x_N[row_N == row]
        assert row_rest(own_N, torch.zeros(len(own_N), dtype=torch.int64)).equal(whole_N[row_N == row])
        assert whole_N[row_N == row].tolist() == pytest.approx(own_N.flip(0).cumsum(0).flip(0).tolist(), abs=1e-5)


def test_cross_entropy_equals_the_number_worked_by_hand():
    # p = 1/2 with weight 1 and 1/4 with weight 3, of a batch of 14 tokens: (ln 2 + 3 ln 4) / 14 = ln 2 / 2
    logp_N = torch.tensor([0.5, 0.25]).log()
    assert sft_loss(logp_N, torch.tensor([1.0, 3.0]), num_tokens=14).item() == pytest.approx(math.log(2) / 2)

"""Losses of pairs and of a teacher, and selection by reward, against numbers worked by hand."""

import math

import pytest
import torch

from shoal.algos.preference_losses import bradley_terry_loss, distillation_advantages, dpo_loss, reverse_kl
from shoal.algos.rejection_sampling import raft, star


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_logps(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), -1)


# --- DPO ---


def test_the_loss_of_pairs_equals_the_numbers_worked_by_hand():
    # beta = ln 3: the first pair moved by +1 and 0 nats, so its margin is ln 3 and its probability 3/4; the second pair
    # did not move: 1/2. L = -(ln 3/4 + ln 1/2) / 2. Gradient of the first: -(1 - 3/4) ln 3 / 2.
    chosen = doubles(-4.0, -2.0).requires_grad_()
    beta = math.log(3.0)
    terms = dpo_loss(chosen, doubles(-6.0, -1.0), doubles(-5.0, -2.0), doubles(-6.0, -1.0), beta=beta, num_pairs=2)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.5)) / 2)
    assert chosen.grad.tolist() == pytest.approx([-0.25 * beta / 2, -0.5 * beta / 2])
    assert terms.chosen_B.tolist() == pytest.approx([beta, 0.0]) and terms.rejected_B.tolist() == [0.0, 0.0]


def test_both_losses_of_pairs_match_finite_differences():
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]

    def dpo(chosen, rejected, chosen_ref, rejected_ref):
        return dpo_loss(chosen, rejected, chosen_ref, rejected_ref, beta=0.3, num_pairs=10).loss

    assert torch.autograd.gradcheck(dpo, tuple(given), eps=1e-7, atol=1e-7)
    assert torch.autograd.gradcheck(
        lambda chosen, rejected: bradley_terry_loss(chosen, rejected, num_pairs=10), tuple(given[:2])
    )


# --- reward model ---


def test_the_reward_model_equals_the_numbers_worked_by_hand():
    # margins ln 3 and 0: probabilities 3/4 and 1/2
    chosen, rejected = doubles(math.log(3.0), 5.0).requires_grad_(), doubles(0.0, 5.0)
    loss = bradley_terry_loss(chosen, rejected, num_pairs=2)
    loss.backward()
    assert loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.5)) / 2)
    assert chosen.grad.tolist() == pytest.approx([-0.125, -0.25])


def test_a_pair_that_is_hopelessly_wrong_has_a_finite_loss_and_gradient():
    chosen = doubles(-1e4).requires_grad_()
    loss = bradley_terry_loss(chosen, doubles(1e4), num_pairs=1)
    loss.backward()
    assert loss.item() == pytest.approx(2e4) and chosen.grad.tolist() == [-1.0]


# --- distillation ---


def test_reverse_kl_equals_the_numbers_worked_by_hand():
    # student (1/2, 1/2), teacher (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3 = 1/2 ln 4/3; two tokens, one of weight 0
    student, teacher = doubles(0.5, 0.5).log().expand(2, 2), doubles(0.25, 0.75).log().expand(2, 2)
    assert reverse_kl(student, teacher, doubles(1.0, 0.0), num_tokens=2).item() == pytest.approx(0.25 * math.log(4 / 3))
    assert distillation_advantages(student[:, 0], teacher[:, 0]).tolist() == pytest.approx([-math.log(2)] * 2)


def test_reverse_kl_matches_finite_differences():
    teacher, weights = random_logps(5, 4, seed=1), doubles(1, 2, 0.5, 0, 1)
    z_NV = random_logps(5, 4, seed=2).requires_grad_()

    def loss(z_NV):
        return reverse_kl(torch.log_softmax(z_NV, -1), teacher, weights, num_tokens=5)

    assert torch.autograd.gradcheck(loss, (z_NV,), eps=1e-7, atol=1e-7)


# --- selection ---


def test_star_keeps_the_right_ones_in_their_order():
    assert star([0.0, 1.0, 0.5, 1.0, 1.0]) == [1, 3, 4]
    assert star([0.0, 1.0, 0.5, 1.0, 1.0], most=2) == [1, 3] and star([0.2, 0.6], right=0.5) == [1] and star([]) == []


def test_raft_keeps_the_best_and_ties_go_to_the_first():
    assert raft([0.5, 1.0, 0.25, 1.0]) == [1] and raft([0.5, 1.0, 0.25, 1.0], keep=3) == [0, 1, 3]
    assert raft([0.5, 0.5]) == [] == raft([]) and raft([0.0, 1.0], keep=9) == [0, 1]
    with pytest.raises(ValueError, match="keep = 0"):
        raft([0.0, 1.0], keep=0)

"""Credit of tokens, steps and turns, against numbers worked by hand and against plain sums."""

import math

import numpy as np
import pytest
import torch

from shoal.algos import advantages
from shoal.algos.advantages import group_advantages, process_advantages, returns_to_go, turn_advantages
from shoal.algos.gae import gae
from shoal.algos.losses import value_loss
from shoal.algos.vineppo import fill_values, of_tokens, start_values, step_advantages, vine_values

# --- GAE ---


def test_gae_equals_the_numbers_worked_by_hand():
    # values 0.5 0.25 1, reward 2 at the end, gamma 1, lambda 0.5:
    #   delta = 0.25 - 0.5 = -0.25;  1 - 0.25 = 0.75;  2 - 1 = 1
    #   A_2 = 1;  A_1 = 0.75 + 0.5 = 1.25;  A_0 = -0.25 + 0.625 = 0.375;  R = A + V
    found = gae([0.5, 0.25, 1.0], [0.0, 0.0, 2.0], lam=0.5)
    assert found.A_T.tolist() == [0.375, 1.25, 1.0] and found.R_T.tolist() == [0.875, 1.5, 2.0]


def test_gae_is_the_sum_that_the_paper_defines():
    rng = np.random.default_rng(0)
    V_T, r_T, gamma, lam = rng.normal(size=7), rng.normal(size=7), 0.9, 0.7
    delta_T = r_T + gamma * np.append(V_T[1:], 0.0) - V_T
    wanted = [sum((gamma * lam) ** (k - t) * delta_T[k] for k in range(t, 7)) for t in range(7)]
    assert gae(V_T, r_T, gamma=gamma, lam=lam).A_T.tolist() == pytest.approx(wanted)


def test_lambda_0_is_one_step_and_lambda_1_is_the_return_less_the_value():
    V_T, r_T = [0.3, 0.6, 0.2], [0.0, 0.5, 1.0]
    assert gae(V_T, r_T, lam=0.0).A_T.tolist() == pytest.approx([0.3, 0.1, 0.8])
    whole = gae(V_T, r_T, lam=1.0)
    assert whole.A_T.tolist() == pytest.approx([1.2, 0.9, 0.8]) and whole.R_T.tolist() == returns_to_go(r_T).tolist()
    assert gae([], []).A_T.size == 0


def test_a_reward_for_each_value_is_demanded():
    for credit in (gae, step_advantages):
        with pytest.raises(ValueError, match="2 values but 1 rewards"):
            credit([0.0, 1.0], [1.0])


# --- the critic's loss ---


def value_terms(values, old, targets, eps=0.2):
    V_N = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old_N, R_N = (torch.tensor(x, dtype=torch.float64) for x in (old, targets))
    terms = value_loss(V_N, old_N, R_N, torch.ones_like(V_N), eps=eps, num_tokens=len(values))
    terms.loss.backward()
    return terms.loss.item(), V_N.grad.tolist(), terms.clipped_N.tolist()


def test_the_value_loss_equals_the_numbers_worked_by_hand():
    # V_old = 0, eps = 0.2:
    #   V = 0.1  R = 1   inside: (0.9)^2 = 0.81                  gradient (0.1 - 1) / 3
    #   V = 0.5  R = 1   clip 0.2: max(0.25, 0.64) = 0.64        clipped, no gradient
    #   V = 0.5  R = -1  clip 0.2: max(2.25, 1.44) = 2.25        moved away: gradient 1.5 / 3
    loss, gradient, clipped = value_terms([0.1, 0.5, 0.5], [0.0] * 3, [1.0, 1.0, -1.0])
    assert loss == pytest.approx(0.5 * (0.81 + 0.64 + 2.25) / 3)
    assert gradient == pytest.approx([-0.3, 0.0, 0.5]) and clipped == [False, True, False]


def test_without_a_clip_it_is_half_the_squared_error():
    loss, gradient, clipped = value_terms([0.5, 2.0], [0.0, 0.0], [1.0, 1.0], eps=math.inf)
    assert loss == pytest.approx(0.5 * 1.25 / 2) and gradient == pytest.approx([-0.25, 0.5])
    assert clipped == [False, False]


def test_the_gradient_of_the_value_loss_matches_finite_differences():
    generator = torch.Generator().manual_seed(1)
    old_N, move_N, R_N, weight_N = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(4))
    V_N = (old_N + 0.3 * move_N).requires_grad_()

    def loss(V_N):
        return value_loss(V_N, old_N, R_N, weight_N.abs(), num_tokens=100).loss

    assert torch.autograd.gradcheck(loss, (V_N,), eps=1e-7, atol=1e-7)


# --- vines ---


def test_a_steps_credit_is_what_it_adds_to_the_mean_of_continuations():
    # 1 of 4 continuations succeeds at the start, 2 of 4 after the first step, 4 of 4 after the second; the end earns 1
    values = vine_values([[0, 0, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]])
    assert values == [0.25, 0.5, 1.0]
    assert step_advantages(values, [0.0, 0.0, 1.0]).tolist() == [0.25, 0.5, 0.0]
    assert of_tokens([0.25, 0.5, 0.0], [2, 1, 3]).tolist() == [0.25, 0.25, 0.5, 0.0, 0.0, 0.0]


def test_the_value_of_the_start_leaves_a_rollouts_own_return_out():
    # of the returns 1, 0 and 0.5, the others have the means 0.25, 0.75 and 0.5
    assert start_values([1.0, 0.0, 0.5]) == [0.25, 0.75, 0.5]
    assert advantages.rloo_advantages([1.0, 0.0, 0.5]).tolist() == [0.75, -0.75, 0.0], (
        "a rollout of one step is worth what RLOO says"
    )


def test_a_state_without_continuations_leaves_its_credit_to_the_next_known_one():
    values = fill_values(vine_values([[0, 1], [], [], [1]]))
    assert values.tolist() == [0.5, 0.5, 0.5, 1.0]
    assert step_advantages(values, [0, 0, 0, 1]).tolist() == [0.0, 0.0, 0.5, 0.0]
    for unknown in ([], [None, 0.5]):
        with pytest.raises(ValueError, match="the first state is unknown"):
            fill_values(unknown)


def test_the_credit_of_all_steps_is_the_reward_less_the_first_value():
    rng = np.random.default_rng(2)
    V_S, r_S = rng.random(6), rng.random(6)
    assert step_advantages(V_S, r_S).sum() == pytest.approx(r_S.sum() - V_S[0])


# --- process rewards ---


def test_each_step_is_credited_with_the_rewards_from_it_on():
    # rewards (1, 0) and (1): mean 2/3. Centred 1/3, -2/3 and 1/3; summed from each step on: -1/3, -2/3 and 1/3.
    first, second = process_advantages([[1.0, 0.0], [1.0]])
    assert first == pytest.approx([-1 / 3, -2 / 3], abs=1e-6) and second == pytest.approx([1 / 3], abs=1e-6)


def test_one_step_a_rollout_is_the_advantage_of_its_outcome():
    rewards = [0.0, 1.0, 0.25, 0.5]
    for method in ("mean", "mean_std"):
        found = process_advantages([[reward] for reward in rewards], method)
        assert np.concatenate(found) == pytest.approx(group_advantages(rewards, method))
        assert found[0].dtype == np.float32


def test_rollouts_without_steps_and_groups_without_any_are_empty():
    assert [one.tolist() for one in process_advantages([[], [1.0, 1.0]])] == [[], [0.0, 0.0]]
    assert [one.tolist() for one in process_advantages([[], []], "mean_std")] == [[], []]
    assert process_advantages([[1.0]], "mean_std")[0].tolist() == [0.0]


# --- turns ---


def test_turns_are_credited_with_what_comes_after_them():
    assert returns_to_go([1.0, 0.0, 2.0]).tolist() == [3.0, 2.0, 2.0]
    assert returns_to_go([1.0, 0.0, 2.0], gamma=0.5).tolist() == [1.5, 1.0, 2.0]
    # returns 3 2 2 | 1 | 0 4: means over three rollouts 4/3, 6/3, 2/3
    found = turn_advantages([[1.0, 0.0, 2.0], [1.0], [-4.0, 4.0]])
    wanted = [[3 - 4 / 3, 2 - 2, 2 - 2 / 3], [1 - 4 / 3], [0 - 4 / 3, 4 - 2]]
    assert [one.tolist() for one in found] == [pytest.approx(row, abs=1e-6) for row in wanted]


def test_one_turn_a_rollout_is_the_advantage_of_its_reward():
    rewards = [0.0, 1.0, 0.25]
    assert np.concatenate(turn_advantages([[reward] for reward in rewards])) == pytest.approx(
        group_advantages(rewards, "mean")
    )
    assert turn_advantages([]) == []

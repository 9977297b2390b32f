"""Advantages, credit of tokens, steps and turns, and averages, against numbers worked by hand and against plain sums."""

import math

import numpy as np
import pytest
import torch

from shoal.algos import advantages
from shoal.algos.advantages import (
    batch_scale,
    fill_values,
    gae,
    group_advantages,
    of_tokens,
    process_advantages,
    returns_to_go,
    rewards_differ,
    start_values,
    step_advantages,
    turn_advantages,
    vine_values,
)
from shoal.algos.losses import token_weights, value_loss
from shoal.algos.regularisers import bonus_share


def test_mean_subtracts_the_group_mean():
    # mean of (1, 0, 0, 1, 3) is 1
    assert group_advantages([1, 0, 0, 1, 3], "mean").tolist() == [0, -1, -1, 0, 2]


def test_mean_std_divides_by_the_sample_deviation():
    # deviations (0, -1, -1, 0, 2), squares sum to 6, ddof = 1: sqrt(6 / 4) = 1.2247449
    expected = np.array([0, -1, -1, 0, 2]) / (1.2247449 + 1e-6)
    assert group_advantages([1, 0, 0, 1, 3], "mean_std") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", ["mean", "mean_std"])
def test_a_group_of_equal_rewards_has_no_signal(method):
    rewards_G = [0.1] * 7
    assert not rewards_differ(rewards_G) and rewards_differ([*rewards_G, 0.1 + 1e-12])
    assert np.abs(group_advantages(rewards_G, method)).max() < 1e-9


# --- Averages, and advantages beside GRPO's ---


# Four rows: rollouts a (two rows, 2 + 1 tokens) and b (3 tokens) of task p, c (6 tokens) of task q; 12 tokens in all.
TOKENS, ROLLOUTS, PROMPTS = [2, 1, 3, 6], ["a", "a", "b", "c"], ["p", "p", "p", "q"]


def test_weights_equal_the_numbers_worked_by_hand():
    def weights(average, L=0.0):
        return token_weights(TOKENS, ROLLOUTS, PROMPTS, average=average, L=L).tolist()

    assert weights("tokens") == [1, 1, 1, 1]
    # 12 / (3 rollouts x 3, 3, 6 tokens)
    assert weights("rollouts") == pytest.approx([12 / 9, 12 / 9, 12 / 9, 12 / 18])
    # 12 / (2 prompts x 6 tokens)
    assert weights("prompts") == pytest.approx([1, 1, 1, 1])
    # 12 / (3 rollouts x 8)
    assert weights("constant", 8.0) == pytest.approx([0.5] * 4)


def test_a_rollout_without_tokens_is_in_the_divisor_alone():
    def weights(average, L=0.0):
        return token_weights([2, 0, 4, 0], ["a", "b", "c", "d"], ["p", "p", "q", "r"], average=average, L=L).tolist()

    assert weights("tokens") == [1, 1, 1, 1]
    # 6 tokens; 4 rollouts x 2 or 4 tokens; 3 prompts x 2 or 4 tokens; 4 rollouts x 8.
    assert [weights("rollouts")[i] for i in (0, 2)] == pytest.approx([6 / 8, 6 / 16])
    assert [weights("prompts")[i] for i in (0, 2)] == pytest.approx([6 / 6, 6 / 12])
    assert [weights("constant", 8.0)[i] for i in (0, 2)] == pytest.approx([6 / 32, 6 / 32])


def test_rloo_takes_the_mean_of_the_others():
    # Rewards 1, 0, 0, 1: the others' means are 1/3, 2/3, 2/3, 1/3.
    assert advantages.rloo_advantages([1, 0, 0, 1]).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_maxrl_divides_by_the_mean():
    # One success of four: mean 1/4, so 3 and -1. Three of four: 1/3 and -1.
    assert advantages.maxrl_advantages([0, 1, 0, 0]).tolist() == pytest.approx([-1, 3, -1, -1])
    assert advantages.maxrl_advantages([1, 1, 0, 1]).tolist() == pytest.approx([1 / 3, 1 / 3, -1, 1 / 3])


@pytest.mark.parametrize("rewards", [[0, 0], [1, 1], [-1, 1], [-2, 1]])
def test_maxrl_learns_nothing_from_a_group_without_a_positive_mean_or_without_differences(rewards):
    assert not advantages.maxrl_has_signal(rewards) and not advantages.maxrl_advantages(rewards).any()


def test_the_batch_has_a_deviation_of_one_after_scaling():
    A_I = np.array([0.5, -0.5, 0.25, -0.25])
    assert (A_I * batch_scale(A_I)).std() == pytest.approx(1.0, abs=1e-5)


def test_equal_advantages_keep_their_size() -> None:
    for equal in ([0.5], [0.0] * 4, [0.1 + 0.2, 0.3]):
        assert batch_scale(np.array(equal)) == 1.0


def test_the_bonus_grows_from_none_at_the_target_to_all_at_half_of_it():
    def share(H, target=0.4):
        return bonus_share(np.full(5, -H, dtype=np.float32), target)

    assert [share(0.5), share(0.4), share(0.1), share(5.0, target=0.0)] == pytest.approx([0, 0, 1, 1], abs=1e-6)
    assert share(0.3) == pytest.approx(0.5, abs=1e-6)


# --- GAE ---


def test_gae_equals_the_numbers_worked_by_hand():
    # values 0.5 0.25 1, reward 2 at the end, gamma 1, lambda 0.5:
    #   delta = 0.25 - 0.5 = -0.25;  1 - 0.25 = 0.75;  2 - 1 = 1
    #   A_2 = 1;  A_1 = 0.75 + 0.5 = 1.25;  A_0 = -0.25 + 0.625 = 0.375;  R = A + V
    found = gae([0.5, 0.25, 1.0], [0.0, 0.0, 2.0], lam=0.5)
    assert found.A_T.tolist() == [0.375, 1.25, 1.0] and found.R_T.tolist() == [0.875, 1.5, 2.0]
    assert gae([], []).A_T.size == 0


def test_gae_is_the_sum_that_the_paper_defines():
    rng = np.random.default_rng(0)
    V_T, r_T, gamma, lam = rng.normal(size=7), rng.normal(size=7), 0.9, 0.7
    delta_T = r_T + gamma * np.append(V_T[1:], 0.0) - V_T
    wanted = [sum((gamma * lam) ** (k - t) * delta_T[k] for k in range(t, 7)) for t in range(7)]
    assert gae(V_T, r_T, gamma=gamma, lam=lam).A_T.tolist() == pytest.approx(wanted)


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
    assert turn_advantages([]) == []

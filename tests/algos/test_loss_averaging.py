"""Averages, and advantages beside GRPO's, against numbers worked by hand."""

import numpy as np
import pytest

from shoal.algos import advantages
from shoal.algos.advantages import batch_scale
from shoal.algos.entropy_target import bonus_share
from shoal.algos.loss_averaging import token_weights

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


@pytest.mark.parametrize("average", ["rollouts", "prompts", "constant"])
def test_weighted_sums_are_the_averages_that_they_are_named_for(average):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, size=24)
    rollouts, prompts = [i // 2 for i in range(24)], [i // 6 for i in range(24)]
    terms = [rng.normal(size=n) for n in tokens]
    w_R = token_weights(tokens.tolist(), rollouts, prompts, average=average, L=10.0)
    found = sum(w * term.sum() for w, term in zip(w_R, terms, strict=True)) / tokens.sum()

    def joined(owners):
        return [
            np.concatenate([t for t, o in zip(terms, owners, strict=True) if o == one]) for one in sorted(set(owners))
        ]

    expected = {
        "rollouts": np.mean([one.mean() for one in joined(rollouts)]),
        "prompts": np.mean([one.mean() for one in joined(prompts)]),
        "constant": np.mean([one.sum() / 10.0 for one in joined(rollouts)]),
    }[average]
    assert found == pytest.approx(expected)


def test_rloo_takes_the_mean_of_the_others():
    # Rewards 1, 0, 0, 1: the others' means are 1/3, 2/3, 2/3, 1/3.
    assert advantages.rloo_advantages([1, 0, 0, 1]).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_rloo_is_the_mean_baseline_times_g_over_g_minus_one():
    rewards = np.random.default_rng(1).normal(size=16)
    expected = advantages.group_advantages(rewards, "mean") * 16 / 15
    assert advantages.rloo_advantages(rewards) == pytest.approx(expected, abs=1e-6)


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

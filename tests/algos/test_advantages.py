"""Advantages of a group against numbers worked by hand."""

import numpy as np
import pytest

from shoal.algos.advantages import group_advantages, rewards_differ


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
    assert not rewards_differ(rewards_G)
    assert np.abs(group_advantages(rewards_G, method)).max() < 1e-9


def test_a_group_whose_rewards_differ_at_all_has_signal():
    assert rewards_differ([0.1, 0.1, 0.1 + 1e-12])


def test_advantages_sum_to_zero():
    rewards_G = np.random.default_rng(0).normal(size=16)
    assert abs(group_advantages(rewards_G.tolist(), "mean_std").sum()) < 1e-5

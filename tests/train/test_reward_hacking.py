"""The signs of reward hacking in a batch: per rollout, and per group."""

import numpy as np

from shoal.train.reward_hacking import signs_of
from shoal.train.rows import TrainingRow


def row(tokens, reward, place, slot=0):
    tokens_T = np.array([99, *tokens])
    zeros_P = np.zeros(len(tokens), np.float32)
    return TrainingRow(tokens_T, np.arange(1, len(tokens_T)), zeros_P, zeros_P, zeros_P, reward, 0, id=(0, slot, place))


def test_the_signs_count_rollouts_once_and_compare_within_groups():
    rows = [
        row([1, 2], 0.0, 0), row([1] * 8, 1.0, 1),  # the longer one is paid
        row([1, 2, 3], 1.0, 0, slot=1), row([4, 5, 6, 7, 8, 9], 0.0, 1, slot=1),  # the shorter one is
        row([5, 5, 5, 5], 1.0, 2, slot=1), row([5, 5, 5, 5], 1.0, 2, slot=1),  # two rows of one rollout
    ]  # fmt: skip
    found = signs_of(rows)
    assert found["repetition_share"] == np.mean([0.0, 0.8, 0.0, 0.0, 0.8])
    assert -1 < found["reward_length_correlation"] < 1


def test_groups_whose_rewards_or_lengths_are_equal_say_nothing():
    assert signs_of([row([1, 2], 1.0, 0), row([1], 1.0, 1)])["reward_length_correlation"] is None
    assert signs_of([]) == {}

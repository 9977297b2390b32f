"""Which rows of a batch are learned from, and signs of reward hacking."""

from dataclasses import replace

import numpy as np

from shoal.protocol.algorithm_config import Dapo, Grpo
from shoal.protocol.messages import BatchGroup
from shoal.train.batch_filter import select, signs_of
from shoal.train.rows import TrainingRow, counted_only, learned, overlong_share


def member(rewards):
    return BatchGroup(version=0, slot=0, submission="", index=0, digest="", rewards=rewards)


def test_groups_without_signal_are_left_out(make_rows):
    rows_G = [make_rows(2, seed=1), make_rows(2, seed=2)]
    selection = select([member((1.0, 1.0)), member((1.0, 0.0))], rows_G, algorithm=Grpo(), version=0, max_staleness=0)
    assert selection == (rows_G[1], 1, 0, 0)


def test_each_rollout_is_held_to_the_staleness_bound(make_rows):
    rows = [replace(row, version=v) for row, v in zip(make_rows(5), [2, 3, 4, 5, 6], strict=True)]
    selection = select([member((1, 0, 0, 0, 0))], [rows], algorithm=Grpo(), version=5, max_staleness=2)
    # Ages 3, 2, 1, 0 and -1: the first is too old, the last claims a policy that does not exist yet.
    assert selection == (rows[1:4], 0, 2, 0)


def test_a_batch_without_usable_groups_gives_no_rows_and_counts_what_was_left_out(make_rows):
    members, rows_G = [member((1.0, 1.0)), member((1.0, 0.0))], [make_rows(2), make_rows(2)]
    assert select(members, rows_G, algorithm=Grpo(), version=3, max_staleness=2) == ([], 1, 2, 0)


def test_an_algorithm_may_only_count_rollouts_that_a_token_limit_ended(make_rows):
    rows = [replace(row, overlong=i == 1) for i, row in enumerate(make_rows(3))]
    kept = {"version": 0, "max_staleness": 0}
    assert select([member((1, 0, 0))], [rows], algorithm=Dapo(), **kept) == (rows, 0, 0, 0)
    masked = select([member((1, 0, 0))], [rows], algorithm=Dapo(mask_overlong=True), **kept)
    assert masked[1:] == (0, 0, 1) and learned(masked.rows) == [rows[0], rows[2]]
    assert masked.rows[1].counts_only and masked.rows[1].advantage_P is rows[1].advantage_P
    every = [replace(row, overlong=True) for row in rows]
    assert select([member((1, 0, 0))], [every], algorithm=Dapo(mask_overlong=True), **kept) == ([], 0, 0, 3)


def test_the_share_of_rollouts_that_a_token_limit_ended_counts_those_of_several_rows_once(make_rows):
    rows = [replace(row, id=(0, 1, i // 2), overlong=i < 2) for i, row in enumerate(make_rows(4))]
    masked = [counted_only(replace(row, id=(0, 2, i), overlong=True)) for i, row in enumerate(make_rows(2))]
    assert overlong_share([rows, (), masked]) == 3 / 4
    assert overlong_share([()]) is None


# --- Signs of reward hacking ---


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

"""Rows from the bytes of groups: what is made of honest ones, and what is refused."""

import numpy as np
import pytest
from msgspec.structs import replace

from shoal.errors import PeerError
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.encoding import digest, to_msgpack
from shoal.protocol.messages import BatchGroup, Group, make_rollout
from shoal.train.rows import Unlearnable, example_row, learned, mean_rewards, one_of_each, rows_of_group

HONEST = {"tokens_T": [5, 6, 7, 8], "author_T": [0, 1, 0, 1], "logprobs_P": [-1.0, -2.0]}


def group_bytes(*rollouts, version=3):
    made = tuple(make_rollout(**r, version=version, ending="environment") for r in rollouts)
    return to_msgpack(Group(slot=9, task=1, env="wordle", rollouts=made))


def member_of(data, rewards=(1.0, 0.0)):
    return BatchGroup(version=3, slot=9, submission="s", index=0, digest=digest(data), rewards=rewards)


def rows_of(data, member=None, **changes):
    limits = {"algorithm": Grpo(), "vocabulary": 64, "max_tokens": 8} | changes
    return rows_of_group(member or member_of(data), data, **limits)


def test_rows_carry_tokens_positions_advantages_and_log_probs():
    first, second = rows_of(group_bytes(HONEST, HONEST))
    assert first.tokens_T.tolist() == [5, 6, 7, 8] and first.positions_P.tolist() == [1, 3]
    assert first.behaviour_logp_P.tolist() == [-1.0, -2.0] and first.weight_P.tolist() == [1.0, 1.0]
    assert first.advantage_P.tolist() == [0.5, 0.5] and second.advantage_P.tolist() == [-0.5, -0.5]
    assert (first.reward, second.reward, first.version) == (1.0, 0.0, 3)


def test_a_turn_that_the_environment_masks_is_read_and_teaches_nothing():
    masked = HONEST | {"author_T": [0, 2, 0, 1]}
    first, second = rows_of(group_bytes(masked, HONEST))
    assert first.tokens_T.tolist() == [5, 6, 7, 8] and first.positions_P.tolist() == [3]
    assert first.behaviour_logp_P.tolist() == [-2.0] and len(first.advantage_P) == len(first.weight_P) == 1
    assert second.positions_P.tolist() == [1, 3]
    masked = rows_of(group_bytes(HONEST | {"author_T": [0, 2, 0, 2]}, HONEST))
    assert [row.counts_only for row in masked] == [True, False]


def test_a_row_names_its_rollout_and_its_group():
    silent = {"tokens_T": [5, 6], "author_T": [0, 0], "logprobs_P": []}
    data = group_bytes(HONEST, silent, HONEST)
    rows = rows_of(data, member_of(data, (1.0, 0.0, 0.0)))
    assert [row.id for row in rows] == [(3, 9, 0), (3, 9, 1), (3, 9, 2)] and {row.group for row in rows} == {(3, 9)}


def test_a_rollout_without_policy_tokens_is_counted_only_and_its_reward_counts_in_the_mean():
    silent = {"tokens_T": [5, 6], "author_T": [0, 0], "logprobs_P": []}
    data = group_bytes(HONEST, HONEST, silent)
    rows = rows_of(data, member_of(data, (1.0, 0.0, -1.0)))
    assert [row.counts_only for row in rows] == [False, False, True]
    assert [row.advantage_P[0] for row in learned(rows)] == [1.0, 0.0]
    assert mean_rewards(rows, ["wordle"]) == {"wordle": 0.0}
    assert mean_rewards(rows[2:], ["wordle"]) == {"wordle": -1.0}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokens_T": [5, 6, 7, 64]}, "outside the vocabulary"),
        ({"tokens_T": [5, 6, 7, -1]}, "outside the vocabulary"),
        ({"tokens_T": [5] * 9, "author_T": [0] * 7 + [1, 1]}, "more tokens than max_tokens, 9, limit 8"),
        ({"tokens_T": [], "author_T": [], "logprobs_P": []}, "must open with the environment's text"),
        ({"author_T": [0, 1, 1]}, "not one author for each token, 3, limit 4"),
        ({"author_T": [0, 1, 3, 1]}, "an author other than"),
        ({"author_T": [1, 1, 0, 0]}, "must open with the environment's text"),
        ({"logprobs_P": [-1.0]}, "not one log-prob for each policy token, 1, limit 2"),
        ({"logprobs_P": [-1.0, float("nan")]}, "not a finite number"),
        ({"logprobs_P": [-1.0, -float("inf")]}, "not a finite number"),
        ({"logprobs_P": [-1.0, 0.5]}, "above 0"),
    ],
)
def test_a_rollout_that_must_not_reach_the_model_is_refused_by_name(changes, fault):
    with pytest.raises(PeerError, match=f"slot 9, version 3: rollout 1.*: .*{fault}"):
        rows_of(group_bytes(HONEST, HONEST | changes))


def test_a_group_of_another_slot_or_version_is_refused():
    data = group_bytes(HONEST, HONEST)
    with pytest.raises(PeerError, match="it says that it is slot 9"):
        rows_of(data, replace(member_of(data), slot=8))
    data = group_bytes(HONEST, HONEST, version=5)
    with pytest.raises(PeerError, match="rollout 0: it says that version 5 sampled it"):
        rows_of(data)


def test_bytes_of_another_group_are_refused():
    with pytest.raises(PeerError, match="the batch says"):
        rows_of(group_bytes(HONEST, HONEST), member_of(b"another"))


def test_bytes_that_are_not_a_group_are_refused():
    with pytest.raises(PeerError, match="not a valid Group"):
        rows_of(b"\x93\x01\x02")


def test_an_array_must_have_a_whole_number_of_values():
    rollout = make_rollout(**HONEST, version=3, ending="environment")
    broken = type(rollout)(rollout.token_ids + b"\0", rollout.author, rollout.logprobs, 3, "environment")
    data = to_msgpack(Group(slot=9, task=1, env="wordle", rollouts=(broken, rollout)))
    with pytest.raises(PeerError, match="not a whole number"):
        rows_of(data)


def test_rewards_must_match_the_rollouts_and_be_finite():
    data = group_bytes(HONEST, HONEST)
    with pytest.raises(PeerError, match="2 rollouts for 3 rewards"):
        rows_of(data, member_of(data, (1.0, 0.0, 0.0)))
    with pytest.raises(PeerError, match="not finite"):
        rows_of(data, member_of(data, (1.0, float("inf"))))


def test_an_example_row_marks_the_tokens_to_imitate():
    row = example_row([1, 2, 3], [0, 1, 1])
    assert row.positions_P.tolist() == [1, 2] and np.array_equal(row.weight_P, [1, 1])


def test_each_row_of_a_rollout_is_learned_from_with_the_rollouts_advantage():
    two = {"tokens_T": [5, 6, 7, 8, 9], "author_T": [0, 1, 0, 2, 1], "logprobs_P": [-1.0, -2.0, -3.0], "starts": (2,)}
    rows = rows_of(group_bytes(two, HONEST))
    assert [row.id for row in rows] == [(3, 9, 0), (3, 9, 0), (3, 9, 1)]
    assert [row.tokens_T.tolist() for row in rows[:2]] == [[5, 6], [7, 8, 9]]
    assert [row.positions_P.tolist() for row in rows[:2]] == [[1], [2]]
    assert [row.behaviour_logp_P.tolist() for row in rows[:2]] == [[-1.0], [-3.0]]
    assert [row.advantage_P.tolist() for row in rows[:2]] == [[0.5], [0.5]]
    assert one_of_each(rows) == [rows[0], rows[2]]
    assert mean_rewards([*rows, *rows], ["wordle", "none"]) == {"wordle": 0.5, "none": None}
    first_masked = rows_of(group_bytes(two | {"author_T": [0, 2, 0, 2, 1]}, HONEST))
    assert [row.counts_only for row in first_masked] == [True, False, False]
    assert mean_rewards(first_masked, ["wordle"]) == {"wordle": 0.5}


def test_rows_beyond_a_limit_are_not_learned_from():
    two = {"tokens_T": [5, 6, 7, 8, 9], "author_T": [0, 1, 0, 2, 1], "logprobs_P": [-1.0, -2.0, -3.0], "starts": (2,)}
    data = group_bytes(two, HONEST)
    assert len(rows_of(data, max_tokens=4, max_rollout_tokens=5)) == 3
    for limits in ({"max_tokens": 4}, {"max_tokens": 2, "max_rollout_tokens": 9}):
        with pytest.raises(Unlearnable, match="rollout 0"):
            rows_of(data, **limits)

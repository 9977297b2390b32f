"""Micro-batches hold every row once, in order, within the budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.pack import collate, pack
from shoal.train.rows import example_row


def row_of(length):
    return example_row(list(range(1, length + 1)), [0] * (length - 1) + [1])


@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(1, 200))
def test_packing_covers_each_row_once_within_the_budget(lengths, budget_tokens):
    packed = pack([row_of(length) for length in lengths], budget_tokens)
    assert sorted(i for members in packed for i in members) == list(range(len(lengths)))
    for members in packed:
        assert len(members) == 1 or len(members) * max(lengths[i] - 1 for i in members) <= budget_tokens


def test_longest_rows_come_first_and_ties_keep_their_order():
    assert pack([row_of(n) for n in (4, 9, 4, 9, 2)], budget_tokens=16) == [[1, 3], [0, 2, 4]]


def test_collated_rows_point_from_each_policy_token_to_the_position_before_it():
    long = example_row([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 1, 0])
    short = example_row([7, 8, 9], [0, 1, 1])
    batch = collate([long, short])
    # The long row ends with token 4, which predicts its last policy token, 5; nothing after that is needed.
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4], [7, 8, 0, 0]]
    assert batch.predictor_N.tolist() == [0, 3, 4, 5]
    assert batch.target_N.tolist() == [2, 5, 8, 9]
    assert np.array_equal(batch.tokens_BT.flatten()[batch.predictor_N], [1, 4, 7, 8])

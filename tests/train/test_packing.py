"""Micro-batches, padded and flat, hold every row once within the budget, read prompts seldom, and give the same step."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import SamplingConfig, TrainConfig
from shoal.train.learner import Learner
from shoal.train.microbatches import FLAT, PADDED, collate, collate_flat, cost_of, input_length, pack, pack_flat, plan
from shoal.train.rows import example_row


def row_of(length):
    return example_row(list(range(1, length + 1)), [0] * (length - 1) + [1])


def group_of(number, answers, prompt=8):
    """Rows of one group: a prompt of its own, then a different answer of each length."""
    rows = []
    for answer in answers:
        tokens_T = [number] * prompt + [1000 + len(rows)] * answer
        row = example_row(tokens_T, [0] * prompt + [1] * answer)
        rows.append(replace(row, id=(0, number, len(rows))))
    return rows


def groups_in(rows, members):
    return {int(rows[i].tokens_T[0]) for i in members}


@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(1, 200))
def test_packing_covers_each_row_once_within_the_budget(lengths, budget_tokens):
    packed = pack([row_of(length) for length in lengths], budget_tokens)
    assert sorted(i for members in packed for i in members) == list(range(len(lengths)))
    for members in packed:
        assert len(members) == 1 or len(members) * max(lengths[i] - 1 for i in members) <= budget_tokens


@given(st.integers(1, 6), st.integers(6, 16), st.integers(64, 128), st.integers(1, 32), st.integers(1, 4096))
def test_a_group_with_a_shared_prompt_is_split_only_if_it_alone_exceeds_the_budget(
    groups, size, prompt, answer, budget_tokens
):
    rows = [row for number in range(groups) for row in group_of(number + 1, [answer] * size, prompt)]
    packed = pack(rows, budget_tokens)
    assert sorted(i for members in packed for i in members) == list(range(len(rows)))
    row_tokens = prompt + answer - 1
    assert all(len(members) * row_tokens <= budget_tokens or len(members) == 1 for members in packed)
    if size * row_tokens <= budget_tokens:
        assert [len(members) for members in packed] == [size] * groups
        assert all(len(groups_in(rows, members)) == 1 for members in packed)


@given(st.lists(st.tuples(st.integers(1, 150), st.lists(st.integers(1, 90), min_size=1, max_size=8)), max_size=8))
def test_packing_by_groups_never_computes_more_than_packing_by_length(shapes):
    rows = [row for n, (prompt, answers) in enumerate(shapes) for row in group_of(n + 1, answers, prompt)]
    packed = pack(rows, 512)
    assert sorted(i for members in packed for i in members) == list(range(len(rows)))
    assert packed == pack(rows, 512), "the same rows always make the same sums"
    alike = [replace(row, id=None) for row in rows]
    assert cost_of(rows, packed) <= cost_of(rows, pack(alike, 512))


def test_groups_of_short_prompts_and_long_answers_are_packed_by_length():
    rows = [row for n in range(4) for row in group_of(n + 1, [10, 100, 200, 300], prompt=3)]
    packed = pack(rows, 2048)
    assert all(len({len(rows[i].tokens_T) for i in members}) == 1 for members in packed)
    assert max(len(groups_in(rows, members)) for members in packed) == 4


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


# --- flat ---


SHAPES = st.lists(
    st.tuples(st.integers(1, 150), st.lists(st.integers(1, 90), min_size=1, max_size=8)), min_size=1, max_size=8
)


def _tokens(rows, families):
    return collate_flat(rows, families).tokens_BT.shape[1]


@given(SHAPES, st.integers(1, 1000))
def test_flat_packing_covers_each_row_once_within_the_budget(shapes, budget_tokens):
    rows = [row for n, (prompt, answers) in enumerate(shapes) for row in group_of(n + 1, answers, prompt)]
    packed = pack_flat(rows, budget_tokens)
    assert sorted(i for families in packed for members in families for i in members) == list(range(len(rows)))
    assert packed == pack_flat(rows, budget_tokens), "the same rows always make the same sums"
    for families in packed:
        assert families == [families[0][:1]] or _tokens(rows, families) <= budget_tokens
    for planned in plan(rows, budget_tokens, FLAT):
        targets = [rows[i].tokens_T[rows[i].positions_P] for i in planned.members]
        assert planned.build(rows).target_N.tolist() == np.concatenate(targets).tolist()


def test_micro_batches_are_full():
    rng = np.random.default_rng(3)
    rows = [row_of(int(length)) for length in rng.integers(10, 700, 600)]
    sizes = [_tokens(rows, families) for families in pack_flat(rows, 4096)]
    assert sum(sizes) == sum(input_length(row) for row in rows)
    assert sum(sizes) / (4096 * len(sizes)) >= 0.95


def test_a_group_reads_its_prompt_once():
    rows = group_of(1, [5, 9, 2], prompt=40)
    assert [_tokens(rows, families) for families in pack_flat(rows, 1000)] == [40 + 4 + 8 + 1]


@pytest.fixture
def mixed_rows(make_rows):
    """Rows of no group, and two groups with prompts of 9 and 1 tokens."""
    rows = make_rows(7)
    for number, (prompt, members) in enumerate(((9, make_rows(4, seed=5)), (1, make_rows(5, seed=6)))):
        for place, row in enumerate(members):
            tokens_T = row.tokens_T.copy()
            tokens_T[: min(prompt, 3)] = number + 1
            rows.append(replace(row, tokens_T=tokens_T, id=(0, number, place)))
    return rows


@pytest.mark.parametrize("budget_tokens", [1, 40, 100, 10_000])
def test_flat_micro_batches_give_the_log_probs_of_padded_ones(budget_tokens, make_model, mixed_rows):
    found = {}
    for packing in (PADDED, FLAT):
        config = TrainConfig(microbatch_tokens=budget_tokens, packing=packing)
        learner = Learner(make_model(), config, SamplingConfig(temperature=0.8), steps=3)
        found[packing] = learner.logprobs(mixed_rows)
    for padded_P, flat_P in zip(found[PADDED], found[FLAT], strict=True):
        np.testing.assert_allclose(flat_P, padded_P, atol=2e-5)


def test_the_same_flat_step_has_the_same_bits(make_model, mixed_rows):
    config = TrainConfig(lr=1e-3, microbatch_tokens=80, packing=FLAT)
    learners = [Learner(make_model(), config, SamplingConfig(), steps=3) for _ in range(2)]
    for learner in learners:
        learner.step(copy.deepcopy(mixed_rows), 0)
    one, other = (dict(learner.model.named_parameters()) for learner in learners)
    assert all(torch.equal(parameter, other[name]) for name, parameter in one.items())

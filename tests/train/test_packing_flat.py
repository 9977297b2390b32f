"""Flat micro-batches: each row once and nothing padded, with the log-probs, gradients and steps of padded ones."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import TrainConfig
from shoal.train.learner import Learner
from shoal.train.packing_flat import FLAT, PADDED, collate_flat, pack_flat, plan
from shoal.train.packing_padded import input_length
from tests.train.test_packing_padded import group_of, row_of

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
        learner = Learner(make_model(), config, temperature=0.8, steps=3)
        found[packing] = learner.logprobs(mixed_rows)
    for padded_P, flat_P in zip(found[PADDED], found[FLAT], strict=True):
        np.testing.assert_allclose(flat_P, padded_P, atol=2e-5)


def test_a_flat_step_is_a_padded_step_up_to_rounding(make_model, mixed_rows):
    models, metrics = {}, {}
    for packing in (PADDED, FLAT):
        config = TrainConfig(lr=1e-3, warmup_steps=0, microbatch_tokens=80, packing=packing)
        learner = Learner(make_model(), config, temperature=1.0, steps=3)
        for version in range(3):
            metrics[packing] = learner.step(mixed_rows, version)
        models[packing] = learner.model
    for name in ("loss", "entropy_nats", "grad_norm", "log_ratio_abs_mean_nats"):
        assert metrics[FLAT][name] == pytest.approx(metrics[PADDED][name], rel=1e-3, abs=1e-6), name
    for name, parameter in models[PADDED].named_parameters():
        assert (parameter - models[FLAT].get_parameter(name)).abs().max() < 5e-5, name


def test_the_same_flat_step_has_the_same_bits(make_model, mixed_rows):
    config = TrainConfig(lr=1e-3, microbatch_tokens=80, packing=FLAT)
    learners = [Learner(make_model(), config, temperature=1.0, steps=3) for _ in range(2)]
    for learner in learners:
        learner.step(copy.deepcopy(mixed_rows), 0)
    one, other = (dict(learner.model.named_parameters()) for learner in learners)
    assert all(torch.equal(parameter, other[name]) for name, parameter in one.items())

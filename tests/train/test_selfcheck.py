"""The start-up check sees a difference between generation and training."""

from dataclasses import replace

import pytest

from shoal.config import TrainConfig
from shoal.train.learner import Learner
from shoal.train.rows import counted_only
from shoal.train.selfcheck import largest_gap_nats, row_to_check


def test_the_gap_is_the_largest_difference_of_any_token(make_model, make_rows):
    learner = Learner(make_model(), TrainConfig(), temperature=1.0, steps=1)
    row = make_rows(1)[0]
    honest_P = learner.logprobs([row])[0]
    assert largest_gap_nats(learner, replace(row, behaviour_logp_P=honest_P)) == 0.0
    off_P = honest_P.copy()
    off_P[0] -= 0.125
    off_P[-1] += 0.5
    assert largest_gap_nats(learner, replace(row, behaviour_logp_P=off_P)) == pytest.approx(0.5, abs=1e-6)


def test_the_longest_row_of_the_current_version_is_checked(make_rows):
    rows = make_rows(12)
    in_order = sorted(rows, key=lambda row: len(row.tokens_T))
    assert row_to_check(rows, 0) is next(row for row in rows if len(row.tokens_T) == len(in_order[-1].tokens_T))
    older = [replace(row, version=1) for row in rows]
    masked = counted_only(replace(in_order[-1], version=0))
    assert row_to_check([*older, masked, replace(in_order[0], version=0)], 0).tokens_T is in_order[0].tokens_T
    assert row_to_check(older, 0) is None


def test_another_temperature_increases_the_gap(make_model, make_rows):
    row = make_rows(1)[0]
    honest_P = Learner(make_model(), TrainConfig(), temperature=1.0, steps=1).logprobs([row])[0]
    other = Learner(make_model(), TrainConfig(), temperature=0.8, steps=1)
    assert largest_gap_nats(other, replace(row, behaviour_logp_P=honest_P)) > 0.1

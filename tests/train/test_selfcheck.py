"""The start-up check sees a difference between generation and training."""

from dataclasses import replace

import pytest

from shoal.config import TrainConfig
from shoal.train.selfcheck import largest_gap_nats
from shoal.train.step import Learner


def test_the_gap_is_the_largest_difference_of_any_token(make_model, make_rows):
    learner = Learner(make_model(), TrainConfig(), temperature=1.0, steps=1)
    row = make_rows(1)[0]
    honest_P = learner.logprobs([row])[0]
    assert largest_gap_nats(learner, replace(row, behaviour_logp_P=honest_P)) == 0.0
    off_P = honest_P.copy()
    off_P[0] -= 0.125
    off_P[-1] += 0.5
    assert largest_gap_nats(learner, replace(row, behaviour_logp_P=off_P)) == pytest.approx(0.5, abs=1e-6)


def test_another_temperature_increases_the_gap(make_model, make_rows):
    row = make_rows(1)[0]
    honest_P = Learner(make_model(), TrainConfig(), temperature=1.0, steps=1).logprobs([row])[0]
    other = Learner(make_model(), TrainConfig(), temperature=0.8, steps=1)
    assert largest_gap_nats(other, replace(row, behaviour_logp_P=honest_P)) > 0.1

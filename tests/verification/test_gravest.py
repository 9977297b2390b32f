"""A mild failure in front does not shield a forgery behind it."""

from types import SimpleNamespace

import numpy as np
import pytest

from shoal.config import BOUNDS
from shoal.engine.interface import PolicyScore
from shoal.protocol.messages import ENVIRONMENT, POLICY, Group, make_rollout
from shoal.protocol.tolerances import wire_bounds
from shoal.verification.check_context import CheckFailure, gravest
from shoal.verification.checks_with_model import logprobs, sampling

TOKENS = 20
MILD_GAP, FORGED_GAP = 0.003, 9.0


def group_and_context(gaps, off):
    """Rollouts of which each has one token with a gap, and log-probs that are off by so much, nats."""
    author = [ENVIRONMENT] + [POLICY] * TOKENS
    rollouts = tuple(
        make_rollout(range(TOKENS + 1), author, [-1.0 - error] * TOKENS, version=0, ending="length") for error in off
    )
    scores = [
        PolicyScore(np.full(TOKENS, -1.0, np.float32), np.array([gap] + [0.0] * (TOKENS - 1), np.float32), None)
        for gap in gaps
    ]
    bounds = wire_bounds(BOUNDS["float32/float32"])
    return Group(0, 0, "e", rollouts), SimpleNamespace(
        bounds=bounds, scores=scores, signs_G=lambda _: np.zeros(len(off)), signs_of_tokens=lambda _: None
    )


@pytest.mark.parametrize("order", [1, -1])
def test_one_mild_token_does_not_shield_a_forged_rollout(order):
    group, ctx = group_and_context([MILD_GAP, FORGED_GAP][::order], [0.0, 0.0])
    failure = sampling(group, ctx)
    assert failure is not None and not failure.mild and failure.rollout == (1, 0)[order < 0]


@pytest.mark.parametrize("order", [1, -1])
def test_one_mild_logprob_does_not_shield_invented_ones(order):
    group, ctx = group_and_context([0.0, 0.0], [0.02, 3.0][::order])
    failure = logprobs(group, ctx)
    assert failure is not None and not failure.mild and failure.rollout == (1, 0)[order < 0]


def test_mild_failures_alone_stay_mild_and_the_first_is_reported():
    group, ctx = group_and_context([0.0, MILD_GAP, MILD_GAP], [0.0, 0.0, 0.0])
    failure = sampling(group, ctx)
    assert failure is not None and failure.mild and failure.rollout == 1
    assert gravest([None, None]) is None
    assert gravest([None, CheckFailure(0, 0, 0, 0, "hard")]) == CheckFailure(0, 0, 0, 0, "hard")

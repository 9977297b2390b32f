"""Sums of claimed log-probs, by hand: leaning one way over a rollout or a group, plainly or against the advantages."""

import dataclasses
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.engine.interface import PolicyScore
from tests.verification.conftest import RULES

BOUNDS = RULES.bounds["float32/float32"]


def judged(case, shifts, bounds, gap=0.0):
    """The verdict on the last group if its rollouts' claims are so many nats too high, spread over their tokens.

    Rollouts 0 and 2 are right, 1 and 3 are wrong. The largest logit of each token is 24.
    """

    def score(requests):
        scores = []
        for request, nats in zip(requests, shifts, strict=True):
            n = len(request.policy_positions)
            gaps = gap * np.eye(1, n, dtype=np.float32)[0]
            scores.append(
                PolicyScore(np.full(n, -1.0 - nats / n, np.float32), gaps, None, np.full(n, 24.0, np.float32))
            )
        return scores

    rules = msgspec.structs.replace(RULES, bounds=RULES.bounds | {"float32/float32": bounds})
    case.tools = dataclasses.replace(case.tools, info=SimpleNamespace(run="run-1", rules=rules), score=score)
    return case.judge(case.body(), audited=(3,))[3]


def leaning(case, *shifts):
    """By bounds that let any single token pass."""
    return judged(case, shifts, msgspec.structs.replace(BOUNDS, logprob=50.0, logprob_mean=1e-4))


@pytest.mark.parametrize("nats", [12.0, -12.0])
def test_claims_of_a_rollout_that_lean_one_way_are_refused_and_mild(case, nats):
    verdict = leaning(case, nats, nats, 0.0, -nats)
    assert (verdict.outcome, verdict.check, verdict.rollout) == ("soft", "logprobs", 0)
    assert verdict.figure == pytest.approx(12.0, abs=0.1) and verdict.bound == pytest.approx(11.5, abs=0.1)
    assert leaning(case, nats * 0.9, nats * 0.9, 0.0, -nats * 0.9).outcome == "accept"


def test_claims_of_a_group_that_lean_one_way_are_refused(case):
    verdict = leaning(case, 4.0, 4.0, 4.0, 4.0)
    assert (verdict.outcome, verdict.check, verdict.rollout) == ("soft", "logprobs", -1)
    assert "one way" in verdict.detail and verdict.off_sum == pytest.approx(16.0, abs=0.01)
    assert leaning(case, 2.0, 2.0, 2.0, 2.0).outcome == "accept"


def test_opposite_claims_on_good_and_bad_rollouts_do_not_cancel(case):
    verdict = leaning(case, -4.0, 4.0, -4.0, 4.0)
    assert (verdict.outcome, verdict.check, verdict.rollout) == ("soft", "logprobs", -1)
    assert "against the advantages" in verdict.detail
    assert (verdict.off_sum, verdict.off_weighted) == (pytest.approx(0, abs=0.01), pytest.approx(-16, abs=0.01))
    assert leaning(case, -2.0, 2.0, -2.0, 2.0).outcome == "accept"


def test_a_run_whose_bounds_give_no_honest_mean_judges_no_sums(case):
    free = msgspec.structs.replace(BOUNDS, logprob=50.0)
    assert not free.logprob_mean and judged(case, (20.0, 20.0, 20.0, 20.0), free).outcome == "accept"


@pytest.mark.parametrize(
    ("largest_logit", "outcome"),
    [(8.0, "accept"), (16.0, "soft"), (24.0, "soft"), (0.0, "soft")],
    ids=["thrice", "half as much again", "once", "never"],
)
def test_errors_in_proportion_to_the_logits_pass_where_the_bounds_grow(case, largest_logit, outcome):
    """Each token (its gap: the first of each rollout) is twice as far off as the bounds allow up to `largest_logit`."""
    bounds = msgspec.structs.replace(BOUNDS, largest_logit=largest_logit, mean_gap=5e-4)
    tokens = [len(np.flatnonzero(r.author_T())) for r in case.groups[3].rollouts]
    far = [2 * bounds.logprob * count for count in tokens]
    verdict = judged(case, far, bounds)
    assert (verdict.outcome, verdict.check) == (outcome, "logprobs" if outcome == "soft" else "")
    verdict = judged(case, [0.0] * 4, bounds, gap=2.5 * bounds.gap)
    assert (verdict.outcome == "accept") == (outcome == "accept") and verdict.check in ("sampling", "")

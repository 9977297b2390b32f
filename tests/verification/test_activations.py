"""The check of activations on hand-made work: the hidden states are the test's, and so are the proofs."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from shoal.algos.activation_projection import agree
from shoal.algos.toploc import ChunkFigures, prove
from shoal.config import ACTIVATION_ERROR
from shoal.engine.interface import PolicyScore
from shoal.errors import StateError
from shoal.protocol.encoding import digest
from shoal.protocol.messages import Check
from shoal.verification.check_context import policy_positions
from shoal.verification.checks_with_model import judge_activations, least_bound
from shoal.verification.encode_submission import encode_submission, largest_submission_bytes, prove_activations
from shoal.verification.verify import verify_submission
from tests.verification.conftest import ENGINE, RULES

BOUND = 0.001
ASKING = msgspec.structs.replace(RULES, proofs="toploc", activation_error=BOUND)
WIDTH = 64


def states(rollout) -> np.ndarray:
    """Hidden states that depend on the rollout's tokens, float32[P, D]."""
    rng = np.random.default_rng(int(rollout.tokens_T().sum()))
    return rng.standard_normal((rollout.num_policy_tokens(), WIDTH)).astype(np.float32)


@pytest.fixture
def asking(case):
    """The submission of a run that asks for proofs."""
    places = {tuple(r.tokens_T().tolist()): r for group in case.groups for r in group.rollouts}

    def score(requests):
        of = [places[tuple(request.token_ids)] for request in requests]
        none = [np.zeros(rollout.num_policy_tokens(), np.float32) for rollout in of]
        return [PolicyScore(zeros - 1, zeros, states(rollout)) for zeros, rollout in zip(none, of, strict=True)]

    case.tools = replace(case.tools, info=SimpleNamespace(run="run-1", rules=ASKING), score=score)
    return case


def proofs_of(case) -> list[bytes]:
    return [prove([states(rollout) for rollout in group.rollouts]) for group in case.groups]


def judged(case, proofs, audited=(0, 1, 2, 3)):
    return case.judge(case.resubmit(proofs=tuple(proofs)), audited)


def test_prover_makes_the_proofs_that_the_check_reads(asking):
    scores = [PolicyScore(np.zeros(0), np.zeros(0), states(r)) for group in asking.groups for r in group.rollouts]
    proofs = prove_activations(asking.groups, scores)
    assert list(proofs) == proofs_of(asking)
    assert {v.outcome for v in judged(asking, proofs)} == {"accept"}
    assert encode_submission("run-1", asking.lease, asking.groups, ENGINE, proofs) == asking.resubmit(proofs=proofs)


def test_prover_does_not_send_states_that_are_not_finite(asking):
    bad = PolicyScore(np.zeros(0), np.zeros(0), np.full((3, WIDTH), np.nan, np.float32))
    with pytest.raises(StateError, match="slot 0: an activation is not finite"):
        prove_activations(asking.groups[:1], [bad] * 4)


@pytest.mark.parametrize("count", [3, 5])
def test_other_number_of_proofs_than_of_groups_is_hard_for_all(asking, count):
    proofs = (proofs_of(asking) * 2)[:count]
    assert [(v.outcome, v.check, v.bound) for v in judged(asking, proofs)] == [("hard", "shape", 4)] * 4


def test_a_bad_proof_of_one_group_does_not_affect_the_others(asking):
    for bad in (b"", bytes(66), prove([-states(r) for r in asking.groups[1].rollouts])):
        proofs = proofs_of(asking)
        proofs[1] = bad
        outcomes = [(v.outcome, v.check) for v in judged(asking, proofs)]
        assert outcomes == [("accept", ""), ("hard", "activations"), ("accept", ""), ("accept", "")]


def test_one_bad_chunk_brings_no_pay_and_no_slash_and_is_located(asking):
    rollouts = asking.groups[0].rollouts
    proofs = proofs_of(asking)
    proofs[0] = prove([-states(r) if r is rollouts[1] else states(r) for r in rollouts])
    chunks = -(-rollouts[1].num_policy_tokens() // 32)
    verdict = judged(asking, proofs)[0]
    assert (verdict.check, verdict.outcome) == ("activations", "soft" if chunks == 1 else "hard")
    assert verdict.rollout == 1 and verdict.position == policy_positions(rollouts[1])[0]
    assert verdict.figure > verdict.bound


def test_proofs_of_groups_that_are_not_audited_must_be_there_but_are_not_read(asking):
    proofs = [bytes(66)] * 4
    assert {v.outcome for v in judged(asking, proofs, audited=())} == {"accept"}
    assert {v.outcome for v in judged(asking, proofs[:3], audited=())} == {"hard"}


def test_submission_may_be_larger_by_the_proofs_and_no_more(asking):
    with_proofs = largest_submission_bytes(asking.lease, ASKING)
    chunks = -(-asking.lease.sampling.max_tokens // 32)
    assert with_proofs - largest_submission_bytes(asking.lease, RULES) == 16 * chunks * 258
    proofs = [bytes(1 << 16), *proofs_of(asking)[1:]]
    assert {v.check for v in judged(asking, proofs)} == {"shape"}


def test_a_run_that_asks_for_proofs_is_scored_with_hidden_states(asking):
    asking.tools = replace(asking.tools, score=asking._score)
    with pytest.raises(AssertionError, match="hidden states"):
        judged(asking, proofs_of(asking))


def test_a_projection_is_bound_to_one_key_and_one_submission(asking):
    """No two projections agree: neither those under two keys, nor those of two submissions under one key."""
    keys, proofs, shown = ("aa" * 32, "bb" * 32), tuple(proofs_of(asking)), []
    for implementation in ("by hand", "by another hand"):
        body = asking.resubmit(proofs=proofs, engine=msgspec.structs.replace(ENGINE, implementation=implementation))
        asked = Check(digest(body), asking.lease, (0, 1, 2, 3), 60.0, project_for=keys)
        projections = verify_submission(body, asked, asking.tools).projections
        assert list(projections) == list(keys)
        shown += projections.values()
    assert not any(agree(one, other) for one, other in combinations(shown, 2))


# --- the verdict from the figures alone ---


def figures(*chunks, entries=32):
    """(mismatched, mean error of the others) of each chunk."""
    wrong = np.array([chunk[0] for chunk in chunks])
    errors = np.array([chunk[1] for chunk in chunks])
    places = np.arange(len(chunks))
    return ChunkFigures(places, places * 0, np.full(len(chunks), entries), wrong, errors * (entries - wrong))


def outcome(found):
    failure = judge_activations(found, BOUND)
    return "accept" if failure is None else "soft" if failure.mild else "hard"


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([(0, 0.0)] * 4, "accept"),
        ([(5, 0.0009)] * 4, "accept"),  # 15 % of 32, rounded up
        ([(6, 0.0)] + [(0, 0.0)] * 3, "soft"),  # one chunk
        ([(32, 0.0)] + [(0, 0.0)] * 3, "soft"),  # one chunk, however bad
        ([(6, 0.0)] * 2 + [(0, 0.0)] * 2, "soft"),  # two, near the bound
        ([(17, 0.0)] * 2 + [(0, 0.0)] * 2, "hard"),  # the wrong half, twice
        ([(0, 0.0016)] + [(0, 0.0)] * 3, "accept"),  # 32 values stray further than a group
        ([(0, 0.0018)] + [(0, 0.0)] * 3, "soft"),
        ([(0, 0.06)] + [(0, 0.0)] * 3, "soft"),  # one chunk again
        ([(0, 0.0011)] * 4, "soft"),  # each chunk passes, their mean does not
        ([(0, 0.02)] * 4, "hard"),
    ],
)
def test_chunks_are_judged_by_mismatches_and_by_mean_error(chunks, expected):
    assert outcome(figures(*chunks)) == expected


@pytest.mark.parametrize("chunks", [[(0, 0.0016)] + [(0, 0.0)] * 3, [(0, 0.0011)] * 4, [(2, 0.004), (0, 0.001)]])
def test_the_least_bound_passes_and_a_smaller_one_does_not(chunks):
    found = figures(*chunks)
    assert judge_activations(found, least_bound(found) * 1.001) is None
    assert judge_activations(found, least_bound(found) * 0.999) is not None


def test_bounds_are_wider_for_bfloat16_and_below_typical_magnitudes_that_vary_by_2_percent():
    mean_of_2_percent = 0.8 * 0.02  # mean of |normal| with that deviation
    assert ACTIVATION_ERROR["float32"] < ACTIVATION_ERROR["bfloat16"] < mean_of_2_percent / 1.5

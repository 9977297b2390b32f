"""Evidence from claimed log-probs: exact for honest claims of any machine, and quick for claims that lean."""

import numpy as np
import pytest

from shoal.algos.sampling_evidence import (
    CLAIM_ALARM_BITS,
    LIMIT_NATS,
    SamplingEvidence,
    cut,
    excessive,
    grown,
    lean,
    room,
)
from shoal.protocol.messages import Bounds

NOISE = Bounds(gap=0.4, flipped=1e-3, mean_gap=5e-4, logprob=1.0, logprob_mean=0.005)
NOTHING = (0.0,) * 4


def honest_d(rng, tokens, noise, temperature=1.0):
    """claimed - replayed log-probs of tokens that a worker samples by its own logits, which differ from the validator's."""
    logits_NV = rng.normal(0.0, 2.0, (tokens, 32)) / temperature
    own_NV = logits_NV + rng.normal(0.0, noise, logits_NV.shape)
    p_NV, q_NV = (np.exp(z - z.max(1, keepdims=True)) for z in (own_NV, logits_NV))
    p_NV, q_NV = p_NV / p_NV.sum(1, keepdims=True), q_NV / q_NV.sum(1, keepdims=True)
    chosen = (p_NV.cumsum(1) > rng.random((tokens, 1))).argmax(1)
    rows = np.arange(tokens)
    return np.log(p_NV[rows, chosen]) - np.log(q_NV[rows, chosen])


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_the_likelihood_ratio_of_honest_claims_has_mean_1_however_noisy_the_machine(noise):
    """Its mean is the reason for the limits. The mean of the differences themselves is not 0: it is a KL divergence."""
    d_N = honest_d(np.random.default_rng(0), 100_000, noise)
    assert np.exp(-d_N).mean() == pytest.approx(1.0, abs=5 * noise / 100_000**0.5)
    assert d_N.mean() > 0.3 * noise**2


def test_a_sum_counts_only_beyond_twice_the_honest_mean_a_token():
    assert lean(3.0, 100, NOISE) == pytest.approx(2.0) and lean(-3.0, 100, NOISE) == pytest.approx(2.0)
    assert lean(-26.4, 66, NOISE) > LIMIT_NATS, "0.4 nats less on each of 66 tokens"


def test_one_token_counts_at_most_its_bound_and_one_that_is_not_a_number_counts_as_the_bound():
    assert cut(np.array([0.5, 7.0, -np.inf, np.nan]), NOISE).tolist() == [0.5, 1.0, -1.0, 1.0]


def test_evidence_grows_by_the_sums_beyond_the_slack_in_each_direction():
    bits = grown(NOTHING, plain=11.0, weighted=-6.0, tokens=100, noise=NOISE)
    assert bits == pytest.approx((10 / np.log(2), 0.0, 0.0, 5 / np.log(2)))


def groups_until_excessive(plain, weighted, past=()):
    evidence = SamplingEvidence(claims=tuple(past) or NOTHING)
    for number in range(1, 1000):
        evidence = evidence._replace(claims=grown(evidence.claims, plain, weighted, 100, NOISE))
        if excessive(evidence):
            return number
    return 0


@pytest.mark.parametrize(("plain", "weighted"), [(-6.0, 0.0), (6.0, 0.0), (0.0, 6.0), (0.0, -6.0)])
def test_a_lean_of_hundredths_of_a_nat_is_found_within_four_groups_in_any_direction(plain, weighted):
    assert groups_until_excessive(plain, weighted) == 4


def test_a_long_honest_past_does_not_delay_the_alarm_for_claims():
    evidence = NOTHING
    for _ in range(100):
        evidence = grown(evidence, 0.5, 0.0, 100, NOISE)  # the honest mean
    assert evidence == NOTHING and groups_until_excessive(-6.0, 0.0, evidence) == 4


def test_honest_claims_are_never_excessive():
    rng, evidence, worst = np.random.default_rng(1), NOTHING, 0.0
    for _ in range(400):
        d_N = cut(honest_d(rng, 500, 0.1), NOISE)
        signs_N = np.repeat(rng.choice([-1.0, 1.0], 5), 100)
        evidence = grown(evidence, float(d_N.sum()), float(d_N @ signs_N), 500, NOISE)
        worst = max(worst, *evidence)
    assert worst < CLAIM_ALARM_BITS / 2


def test_room_grows_with_the_logits_and_is_never_below_1():
    assert np.asarray(room(np.array([4.0, 8.0, 24.0], np.float32), 8.0)).tolist() == [1.0, 1.0, 3.0]
    assert room(np.array([24.0], np.float32), 0.0) == 1.0 and room(None, 8.0) == 1.0

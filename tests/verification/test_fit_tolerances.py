"""Bounds from measured noise, and power from other seeds: hand-worked arrays."""

import numpy as np
import pytest

from shoal.algos.toploc import ChunkFigures
from shoal.errors import StateError
from shoal.protocol.messages import Bounds
from shoal.verification.fit_tolerances import (
    LEAST,
    MeasuredNoise,
    joined,
    power,
    power_by_entropy,
    propose,
    propose_activation_error,
)


def noise(gaps: dict[float, int], tokens: int, off: float, logit: float = 5.0) -> MeasuredNoise:
    """So many tokens with each gap, all others at 0; every other log-prob off by `off`, the rest by -`off`."""
    gaps_N = np.zeros(tokens, dtype=np.float32)
    gaps_N[: sum(gaps.values())] = np.repeat(list(gaps), list(gaps.values()))
    signs_N = np.where(np.arange(tokens) % 2, -1.0, 1.0)
    return MeasuredNoise(gaps_N, off * signs_N, np.full(tokens, logit, dtype=np.float32))


def test_no_bound_is_below_the_least_however_small_the_noise() -> None:
    assert propose(noise({}, 20_000, 1e-5), 20_000, safety=2.0) == LEAST


def test_bounds_are_the_measured_noise_times_the_safety_factor() -> None:
    # 22 of 20,000 gaps are 0.125, so that is the 99.99th percentile too; one is 0.5, above the bound of 0.25.
    bounds = propose(noise({0.125: 22, 0.5: 1}, 20_000, 0.15), 20_000, safety=2.0)
    assert bounds.gap == pytest.approx(0.25)
    assert bounds.flipped == pytest.approx(3 / 20_000)  # more than twice the one that was seen
    assert bounds.mean_gap == pytest.approx(2 * (22 * 0.125 + 0.25) / 20_000)
    assert bounds.logprob == pytest.approx(0.3)


def test_bounds_are_rounded_up() -> None:
    bounds = propose(noise({0.1234: 40}, 20_000, 0.1234), 20_000, safety=1.0)
    assert (bounds.gap, bounds.logprob) == (0.13, 0.13)


def test_without_flips_the_bound_is_three_in_the_tokens_unless_the_gaps_make_flips_impossible() -> None:
    assert propose(noise({}, 1000, 0.01), 1000, safety=2.0).flipped == 3 / 1000
    assert propose(noise({}, 1000, LEAST.gap / 4), 1000, safety=2.0).flipped == LEAST.flipped


def test_joined_measurements_keep_every_token() -> None:
    both = joined([noise({0.5: 1}, 3, 0.1), noise({}, 2, 0.2)])
    assert both.gaps_N.tolist() == [0.5, 0, 0, 0, 0] and both.off_N.tolist() == [0.1, -0.1, 0.1, 0.2, -0.2]
    assert both.largest_N.tolist() == [5.0] * 5


def test_the_honest_mean_of_claims_is_measured_and_is_never_below_a_fiftieth_of_their_bound() -> None:
    # log cosh 0.2 = 0.0199: half of that, twice, is more than 2 % of the bound of 0.4.
    assert propose(noise({}, 20_000, 0.2), 20_000, safety=2.0).logprob_mean == pytest.approx(0.02)
    leaning = noise({}, 20_000, 0.1)._replace(off_N=np.full(20_000, 0.1))
    assert propose(leaning, 20_000, safety=2.0).logprob_mean == pytest.approx(0.2)
    assert propose(noise({}, 20_000, 0.01), 20_000, safety=2.0).logprob_mean == pytest.approx(0.0004)


def test_bounds_of_coarse_arithmetic_do_not_depend_on_the_size_of_the_logits() -> None:
    """Logits three times as large give errors three times as large; the bounds say so, and hold for both."""
    small = propose(noise({0.125: 22}, 20_000, 0.1, logit=10.0), 20_000, safety=2.0, coarse=True)
    mixed = joined([noise({0.125: 22}, 20_000, 0.1, logit=10.0), noise({0.375: 22}, 20_000, 0.3, logit=30.0)])
    both = propose(mixed, 40_000, safety=2.0, coarse=True)
    assert small.largest_logit == 10.0 and both.largest_logit == 20.0
    assert small.gap == 0.25 and both.gap / both.largest_logit == pytest.approx(small.gap / 10.0, rel=0.05)
    assert propose(mixed, 40_000, safety=2.0).largest_logit == 0.0


def test_power_is_given_by_entropy_and_counts_tokens_beyond_the_bound() -> None:
    bounds = Bounds(gap=0.1, flipped=1e-5, mean_gap=1e-6, logprob=0.1)
    entropy_P = np.array([2.0, 0.0, 2.0, 0.0])
    gaps_P = np.array([1.0, 0.05, 1.0, 0.0], dtype=np.float32)
    low, high = power_by_entropy(entropy_P, gaps_P, bounds, parts=2)
    assert (low.entropy, low.changed, low.needed) == (0.0, 0.0, 1_000_000)
    assert (high.entropy, high.changed, high.needed) == (2.0, 1.0, 2)
    assert power(entropy_P, gaps_P, bounds).changed == 0.5


def proof(*mismatched: int, entries: int = 32, error: float = 0.004) -> ChunkFigures:
    """A group's figures: chunks of so many values, of which some changed sign or size and the others are off by `error`."""
    wrong_C = np.array(mismatched)
    entries_C, zeros_C = np.full(len(wrong_C), entries), np.zeros(len(wrong_C), dtype=int)
    return ChunkFigures(zeros_C, zeros_C, entries_C, wrong_C, error * (entries_C - wrong_C))


def test_the_bound_of_proofs_is_the_worst_honest_one_times_the_safety_factor() -> None:
    assert propose_activation_error([proof(0, 1), proof(2, 0, error=0.006)], safety=2.0) == pytest.approx(0.012)
    assert propose_activation_error([proof(1, 0, entries=4)], safety=2.0) > 0, "one value may change in any chunk"


@pytest.mark.parametrize("mismatched", [6, 3])
def test_proofs_that_change_nearly_as_many_values_as_are_allowed_cannot_be_asked_for(mismatched: int) -> None:
    """Of 32 values, 5 may change. Honest work that changed 3 among the few groups of a calibration will reach 6."""
    with pytest.raises(StateError, match=r"1 of 2 honest proofs.*more than 1/2 of that.*verify\.proofs = \"none\""):
        propose_activation_error([proof(0, 0), proof(mismatched, 0)], safety=2.0)

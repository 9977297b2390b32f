"""Evidence from sampling: figures worked by hand, honest noise raises no alarm, and a cheat within the bounds soon does."""

import math
from typing import NamedTuple

import numpy as np
import pytest

from shoal.algos import sampling_evidence
from shoal.algos.sampling_evidence import (
    EvidenceFigures,
    SamplingEvidence,
    excessive,
    largest_sum,
    most_flipped,
    pooled,
    update,
)


class Honest(NamedTuple):
    gap: float = 1e-3
    flipped: float = 1e-5
    mean_gap: float = 1e-7


FLOAT32 = Honest()
BFLOAT16 = Honest(gap=0.2, flipped=1e-3, mean_gap=5e-4)
PAIRS = pytest.mark.parametrize("noise", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
GROUP_TOKENS = 480


def honest(rng: np.random.Generator, noise: Honest) -> EvidenceFigures:
    """A group with as much noise as calibration allows: the allowed rate of flips, and gaps with the allowed mean."""
    flipped = int(rng.binomial(GROUP_TOKENS, noise.flipped))
    share = (
        noise.mean_gap / noise.gap - noise.flipped
    )  # the mean that remains for gaps below the bound; each gap is half of the bound
    small = int(rng.binomial(GROUP_TOKENS, 2 * share))
    return EvidenceFigures(GROUP_TOKENS, flipped, flipped * noise.gap + small * noise.gap / 2)


def groups_until_excessive(
    figures: EvidenceFigures, noise: Honest, before: SamplingEvidence | None = None, most: int = 1000
) -> int:
    evidence = before or SamplingEvidence()
    for count in range(1, most + 1):
        evidence = update(evidence, figures, noise)
        if excessive(evidence):
            return count
    return most + 1


# --- figures ---


def test_gaps_are_pooled_by_count_and_by_sum_up_to_the_bound() -> None:
    gaps_N = np.array([0.0, 0.25, 0.5, 3.0, np.inf, np.nan, 0.0], dtype=np.float32)
    assert pooled(gaps_N, 0.5) == EvidenceFigures(tokens=7, flipped=3, gap_sum=0.25 + 4 * 0.5)


def test_no_tokens_give_figures_of_zero() -> None:
    assert pooled(np.empty(0, dtype=np.float32), 0.5) == EvidenceFigures(0, 0, 0.0)


# --- one rollout, one group ---


@pytest.mark.parametrize(
    ("tokens", "flipped", "alpha", "most"),
    [
        (100, 1e-2, 0.10, 2),  # Poisson(1): P(>1) = 0.264, P(>2) = 0.080
        (100, 1e-2, 0.05, 3),  # P(>3) = 0.019
        (100, 1e-2, 0.01, 4),  # P(>4) = 0.0037
        (10, 1e-9, 1e-5, 1),  # never less than one
        (0, 1e-2, 1e-5, 1),
    ],
)
def test_the_allowed_flips_follow_a_poisson_tail(tokens: int, flipped: float, alpha: float, most: int) -> None:
    assert most_flipped(tokens, Honest(flipped=flipped), alpha) == most


def test_the_allowed_sum_solves_its_inequality() -> None:
    noise = Honest(gap=0.5, mean_gap=0.05)  # x has mean 0.1; a quarter of 100 tokens: 100 KL(0.25 | 0.1) = 9.23 nats
    information = 100 * (0.25 * math.log(2.5) + 0.75 * math.log(0.75 / 0.9))
    assert largest_sum(100, noise, alpha=math.exp(-information)) == pytest.approx(25 * 0.5, rel=1e-9)


def test_a_few_tokens_may_all_be_at_the_bound() -> None:
    assert largest_sum(1, BFLOAT16) == BFLOAT16.gap


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.999])
@pytest.mark.parametrize("tokens", [1, 100_000])
def test_the_allowed_flips_stay_near_the_expected_count_at_any_rate(rate: float, tokens: int) -> None:
    allowed = most_flipped(tokens, Honest(flipped=rate))
    assert max(1, rate * tokens) <= allowed <= rate * tokens + 10 * math.sqrt(rate * tokens) + 10


# --- a node over time ---


def test_evidence_grows_by_the_bits_worked_by_hand() -> None:
    noise = Honest(gap=0.5, flipped=0.01, mean_gap=0.01)
    evidence = update(SamplingEvidence(), EvidenceFigures(tokens=100, flipped=3, gap_sum=2.0), noise)
    # Flips: 3 b - 100 * 0.01 * (2^b - 1) * log2(e). Gaps: 4 b - 100 * 0.02 * (2^b - 1) * log2(e).
    assert evidence.flips == pytest.approx((3 - 1.442695, 6 - 3 * 1.442695, 0.0, 0.0), abs=1e-5)
    assert evidence.gaps == pytest.approx((4 - 2 * 1.442695, 0.0, 0.0, 0.0), abs=1e-5)


@PAIRS
def test_honest_noise_raises_no_alarm_in_10_000_groups(noise: Honest) -> None:
    rng, evidence = np.random.default_rng(0), SamplingEvidence()
    most, largest = most_flipped(GROUP_TOKENS, noise), largest_sum(GROUP_TOKENS, noise)
    for _ in range(10_000):
        group = honest(rng, noise)
        evidence = update(evidence, group, noise)
        assert not excessive(evidence) and group.flipped <= most and group.gap_sum <= largest


def test_false_alarms_stay_below_the_stated_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule for 2^8 groups: with the threshold at 8 + 3 bits, at most one of 256 honest groups raises the alarm."""
    monkeypatch.setattr(sampling_evidence, "ALARM_BITS", 11.0)
    rng, alarms, evidence, groups = np.random.default_rng(2), 0, SamplingEvidence(), 20_000
    for _ in range(groups):
        evidence = update(evidence, honest(rng, BFLOAT16), BFLOAT16)
        if excessive(evidence):
            alarms, evidence = alarms + 1, SamplingEvidence()
    assert 0 < alarms <= groups / 256


@PAIRS
@pytest.mark.parametrize("spent", ["flips", "gaps"])
def test_using_up_the_tolerance_of_every_group_raises_the_alarm_within_four_groups(noise: Honest, spent: str) -> None:
    """Every group has as much as the test of one group lets pass: as flips, or as gaps just below the bound."""
    if spent == "flips":
        most = most_flipped(GROUP_TOKENS, noise)
        figures = EvidenceFigures(GROUP_TOKENS, most, most * noise.gap)
    else:
        figures = EvidenceFigures(GROUP_TOKENS, 0, largest_sum(GROUP_TOKENS, noise))
    assert groups_until_excessive(figures, noise) <= 4


def test_twice_the_honest_noise_raises_the_alarm_within_a_hundred_groups() -> None:
    one_flip = EvidenceFigures(GROUP_TOKENS, 1, 0.0)  # 2.1 times the 0.48 flips that honest noise gives
    assert 20 < groups_until_excessive(one_flip, BFLOAT16) <= 100


def test_a_long_honest_past_does_not_delay_the_alarm() -> None:
    cheat = EvidenceFigures(GROUP_TOKENS, 6, 6 * BFLOAT16.gap)
    evidence = SamplingEvidence()
    for _ in range(1000):
        evidence = update(evidence, EvidenceFigures(GROUP_TOKENS, 0, 0.0), BFLOAT16)
    assert evidence == SamplingEvidence()
    assert groups_until_excessive(cheat, BFLOAT16, evidence) == groups_until_excessive(cheat, BFLOAT16)


# --- power ---


def test_the_tokens_needed_follow_a_binomial() -> None:
    always = Honest(flipped=1e-9)  # one flip is allowed, so two are needed
    assert sampling_evidence.tokens_to_detect(1.0, always) == 2
    # (1 - p)^n + n p (1 - p)^(n - 1) <= 0.05 at p = 0.1 first holds for n = 46.
    assert sampling_evidence.tokens_to_detect(0.1, always) == 46
    assert sampling_evidence.tokens_to_detect(0.0, always, most=500) == 500

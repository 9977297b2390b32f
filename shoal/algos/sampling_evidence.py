"""Evidence against a worker from replayed sampling: what honest noise may do in a rollout, in a group, in a node's life.

A replay gives each token a gap: the distance in nats from the best choice to the token that was written (Token-DiFR,
arXiv:2511.20621). An honest token's gap is 0 up to rounding. Two figures are pooled over tokens: F, the number of gaps
above a bound, and S, the sum of the gaps, each cut at the bound. Calibration gives upper bounds q and m on what honest
work adds to F and S per token.

    symbol   meaning
    N        tokens
    x        what one token adds: [gap > bound] for F, min(gap, bound) / bound for S; always in [0, 1]
    r        upper bound on the honest mean of x: q for F, m / bound for S
    alpha    chance of a false alarm: FALSE_ALARM for one rollout or group, 2^-20 a group over a node's life
    k        multiple of the honest rate that a test is made for, 2^b

One inequality gives all tests, for any distribution of x in [0, 1] with mean at most r (Chernoff; Hoeffding, J. Am.
Stat. Assoc. 58, 1963):   E[k^x] <= 1 + r (k - 1) <= exp(r (k - 1)).   So k^(sum of x) / exp(N r (k - 1)) has mean at
most 1, and is evidence against honesty.

Over a node's life, the evidence is multiplied group by group and never falls below 1 (Page's CUSUM as an e-detector,
Shin, Ramdas and Rinaldo, arXiv:2203.03532). An honest node is called excessive at most once in 1 / alpha groups, and a
long honest past does not let a node cheat later. Evidence is kept in bits, and computed from sums and products with
exact constants, so that a replay on another machine gives the same bytes.

Axes: N tokens.
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM = 1e-5
"""alpha of a test of one rollout or one group."""

ALARM_BITS = 23.0
"""Evidence from here on is excessive: 2^20 groups between false alarms, times 2^3 for the eight tests that share them."""

CLAIM_ALARM_BITS = 28.0
"""The same for the evidence from claims: so high that its four tests hardly add to the false alarms of the others."""

EXCESS_BITS = (1, 2, 4, 8)
"""The b of each test; a test is best at 2^b times the honest rate."""

LOG2_E = 1.4426950408889634
"""Nats to bits, written out, because the last bit of a library's logarithm may differ between machines."""


class SamplingNoise(Protocol):
    """What calibration says about honest work, for one pair of sampling and replaying dtypes."""

    @property
    def gap(self) -> float:
        """A token with a larger gap counts as flipped, nats."""

    @property
    def flipped(self) -> float:
        """q: the largest share of honest tokens that are flipped."""

    @property
    def mean_gap(self) -> float:
        """m: the largest mean gap of honest tokens, each cut at `gap`; nats."""


def room(largest_N: NDArray[np.float32] | None, largest_logit: float) -> NDArray[np.float32] | float:
    """How many times as far as its bounds each token may be off, from the largest |logit / temperature| at its place.

    Rounding errors are in proportion to the numbers that are rounded, and logits grow while a policy learns. The bounds of
    a run hold up to `largest_logit`; 0 says that they hold for any size.
    """
    if largest_N is None or not largest_logit:
        return 1.0
    return np.maximum(1.0, largest_N / largest_logit).astype(np.float32)  # guard: room-is-never-below-1


class EvidenceFigures(NamedTuple):
    """Pooled figures of a rollout, or of a group."""

    tokens: int
    flipped: int
    gap_sum: float
    """Sum of the gaps, each cut at the bound, nats."""


def pooled(gaps_N: NDArray[np.float32], bound: float) -> EvidenceFigures:
    """N, F and S of the gaps of some tokens, nats. A gap that is not a number counts as flipped."""
    gaps = gaps_N.astype(np.float64)
    # guard: nan-gap-is-a-flip
    return EvidenceFigures(gaps.size, int(np.count_nonzero(~(gaps <= bound))), float(np.fmin(gaps, bound).sum()))


def most_flipped(tokens: int, noise: SamplingNoise, alpha: float = FALSE_ALARM) -> int:
    """Number of flipped tokens that honest work exceeds with probability at most alpha; at least 1: P(Poisson > c)."""
    mean = tokens * noise.flipped
    count, term = 0, math.exp(-mean)
    beyond = 1.0 - term
    while beyond > alpha or count == 0:  # guard: one-flip-is-allowed
        count += 1
        term *= mean / count
        beyond -= term
        if count > mean and term < alpha * 1e-3:  # the rest of the sum is rounding
            break
    return count


def largest_sum(tokens: int, noise: SamplingNoise, alpha: float = FALSE_ALARM) -> float:
    """Sum of gaps, nats, that honest work exceeds with probability at most alpha.

    This is the s for which tokens * KL(s / (tokens * gap), r) = log(1 / alpha), with the KL of two Bernoulli distributions.
    """
    rate, demanded = noise.mean_gap / noise.gap, math.log(1.0 / alpha) / max(1, tokens)
    low, high = rate, 1.0
    if _kl(high, rate) <= demanded:
        return tokens * noise.gap
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _kl(middle, rate) < demanded else (low, middle)
    return high * tokens * noise.gap


def _kl(share: float, rate: float) -> float:
    inside = 0.0 if share >= 1.0 else (1.0 - share) * math.log((1.0 - share) / (1.0 - rate))
    return share * math.log(share / rate) + inside


# --- a node over time ---


class SamplingEvidence(NamedTuple):
    """Bits against a node's honesty. 0 means no evidence. Of flips and gaps, one figure for each of `EXCESS_BITS`."""

    flips: tuple[float, ...] = (0.0,) * len(EXCESS_BITS)
    gaps: tuple[float, ...] = (0.0,) * len(EXCESS_BITS)
    claims: tuple[float, ...] = (0.0,) * 4
    """From claimed log-probs, by direction; see `grown`."""


def update(evidence: SamplingEvidence, figures: EvidenceFigures, noise: SamplingNoise) -> SamplingEvidence:
    """Evidence after one more audited group. Its figures must be pooled with the bound of the same `noise`."""
    return evidence._replace(
        flips=_grown(evidence.flips, float(figures.flipped), figures.tokens, noise.flipped),
        gaps=_grown(evidence.gaps, figures.gap_sum / noise.gap, figures.tokens, noise.mean_gap / noise.gap),
    )


def _grown(bits: tuple[float, ...], total: float, tokens: int, rate: float) -> tuple[float, ...]:
    """Bits grow by b sum(x), fall by N r (2^b - 1) log2(e), and stop at 0."""
    expected = tokens * rate * LOG2_E
    # guard: no-credit-for-the-past
    return tuple(max(0.0, had + b * total - expected * (2**b - 1)) for had, b in zip(bits, EXCESS_BITS, strict=True))


def excessive(evidence: SamplingEvidence) -> bool:
    """Whether honest noise cannot explain a node. An honest node gets here at most once in a million audited groups."""
    # guard: claims-are-evidence
    if max(evidence.claims) >= CLAIM_ALARM_BITS:
        return True
    return max(*evidence.flips, *evidence.gaps) >= ALARM_BITS  # guard: flips-are-evidence, gaps-are-evidence


# --- power ---


def tokens_to_detect(changed: float, noise: SamplingNoise, power: float = 0.95, most: int = 1_000_000) -> int:
    """Number of tokens in a rollout from which a cheat that flips a share `changed` of them is refused with chance `power`.

    Accurate to 2 %, with tokens taken as independent. Returns `most` if it takes that many or more.
    """
    tokens = 1
    while tokens < most:
        if 1.0 - _at_most(most_flipped(tokens, noise), tokens, changed) >= power:
            return tokens
        tokens += max(1, tokens // 50)
    return most


def _at_most(count: int, tokens: int, share: float) -> float:
    """P(Binomial(tokens, share) <= count)."""
    if share <= 0.0 or count >= tokens:
        return 1.0
    if share >= 1.0:
        return 0.0
    logs = (
        math.lgamma(tokens + 1) - math.lgamma(c + 1) - math.lgamma(tokens - c + 1)
        + c * math.log(share) + (tokens - c) * math.log1p(-share)
        for c in range(count + 1)
    )  # fmt: skip
    return math.fsum(math.exp(log) for log in logs)


# --- Statistics of claimed log-probs: whether they lean one way by more than honest rounding does ---
#
# An honest worker samples token x from p, by its own arithmetic, and claims log p(x). The validator finds log q(x). The
# difference d = log p(x) - log q(x) is not 0 on average: its mean is the KL divergence of p from q. But e^-d has mean
# sum p (q / p) = 1 exactly, whatever the machines, and e^d has mean 1 + chi-square, which is about e^(2 KL) if rounding
# is the cause. So the product of e^-d, or of e^(d - 2 m) with m an upper bound on the mean, has mean at most 1 under
# honesty: it is a likelihood ratio (an e-process). Claims that lean by more than 2 m a token are found in the end.
#
# Advantages depend on what was sampled, so a sum that is weighted by their signs leans a little even if nobody lies.
# Therefore 2 m is taken off in every direction. The weighted sum is needed because claims that mute good rollouts and
# amplify bad ones may cancel in the plain sum.
#
#     symbol   meaning
#     d        claimed - replayed log-prob of a token, cut to [-bound, bound]; nats
#     m        upper bound on the honest mean of d, from calibration; nats
#     D        sum of d over a rollout, or over a group plainly or times the sign of each rollout's advantage
#     T        tokens of the sum


LIMIT_NATS = 11.512925464970229
"""ln(1 / 1e-5): at most once in 100,000 times do the honest claims of a rollout, or of a group, lean further."""

SLACK = 2.0
"""Multiple of m that is taken off for each token: for small d, the log of the mean of e^d is twice the mean of d."""


class ClaimNoise(Protocol):
    """What calibration says about honest claims, for one pair of sampling and replaying dtypes."""

    @property
    def logprob(self) -> float:
        """Each difference is cut to this, nats."""

    @property
    def logprob_mean(self) -> float:
        """m; 0 if the run judges no sums."""


def cut(off_N: NDArray[np.float64], noise: ClaimNoise) -> NDArray[np.float64]:
    """d of some tokens. A difference that is not a number counts as the largest."""
    return np.clip(np.nan_to_num(off_N, nan=noise.logprob), -noise.logprob, noise.logprob)


def lean(total: float, tokens: int, noise: ClaimNoise) -> float:
    """How far |D| exceeds what is honest, nats; to be compared with `LIMIT_NATS`."""
    return abs(total) - SLACK * tokens * noise.logprob_mean


def grown(bits: tuple[float, ...], plain: float, weighted: float, tokens: int, noise: ClaimNoise) -> tuple[float, ...]:
    """Bits of a node's evidence after one more audited group: plain D upwards and downwards, weighted D likewise.

    Each stops at 0, so that an honest past does not let a node lie later. An honest node reaches b bits at most once in
    2^b groups.
    """
    slack = SLACK * tokens * noise.logprob_mean
    totals = (plain, -plain, weighted, -weighted)
    # guard: no-credit-for-past-claims
    return tuple(max(0.0, had + (total - slack) * LOG2_E) for had, total in zip(bits, totals, strict=True))

"""Measure honest numerical noise: propose bounds that it passes, and say what those bounds can detect.

Axes: N tokens, counted once for each replay; P tokens, counted once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.algos.sampling_evidence import SLACK, pooled, room, tokens_to_detect
from shoal.algos.toploc import ChunkFigures
from shoal.errors import StateError
from shoal.protocol.messages import Bounds
from shoal.protocol.tolerances import MEAN_OF_LOGPROB
from shoal.verification.checks_with_model import least_bound, most_mismatched

FAR_PERCENTILE = 0.9999
"""Quantile of the gaps, and of the log-prob differences, to which the safety factor is applied."""

LEAST = Bounds(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=1e-3, logprob_mean=2e-5)
"""No bound is set below these, even if the measured machines agree better. One machine agrees with itself better than
with other hardware in float32, and a choice within 0.001 nats of the best gains a cheat nothing."""


LEAST_ACTIVATION_ERROR = 1e-3
"""The smallest bound for proofs of activations. Neighbouring codes differ by up to 0.008, and on other hardware float32
may round one value in eight to the neighbour."""


class MeasuredNoise(NamedTuple):
    """What replaying honest tokens measured."""

    gaps_N: NDArray[np.float32]
    """Replay gaps, nats."""
    off_N: NDArray[np.float64]
    """claimed - replayed log-probs, nats."""
    largest_N: NDArray[np.float32]
    """Largest |logit / temperature| at each token."""
    figures: tuple[ChunkFigures, ...] = ()
    """Figures of each group's proof of activations, once for each replay; empty if the run asks for no proofs."""

    def activation_error(self) -> float:
        """The smallest bound that lets every proof pass."""
        return max(least_bound(of_group) for of_group in self.figures)

    def mismatched(self) -> float:
        """The largest share of a chunk's values whose sign or size changed."""
        return max(float((of_group.mismatched_C / of_group.entries_C).max()) for of_group in self.figures)


def joined(parts: list[MeasuredNoise]) -> MeasuredNoise:
    """Concatenate the parts."""
    return MeasuredNoise(
        np.concatenate([part.gaps_N for part in parts]),
        np.concatenate([part.off_N for part in parts]),
        np.concatenate([part.largest_N for part in parts]),
        tuple(of_group for part in parts for of_group in part.figures),
    )


def propose(noise: MeasuredNoise, distinct: int, safety: float, coarse: bool = False) -> Bounds:
    """Bounds for one pair of dtypes: `safety` times what was measured over `distinct` tokens.

    For a `coarse` pair, such as any with bfloat16, the bounds grow with the logits: `largest_logit` is the mean of what was
    met, and gaps and differences at larger logits count for less in proportion.

    `gap` is at least the largest log-prob error, so no honest token exceeds it twofold: a flip's gap is at most twice the
    noise of a log-prob. With no flips observed, assume a share of 3 / distinct (the rule of three, 95 %), unless `gap` is
    so far above the noise that flips are impossible.
    """
    largest_logit = _rounded_up(float(noise.largest_N.mean())) if coarse else 0.0
    room_N = room(noise.largest_N, largest_logit)
    gaps_N, off_N = noise.gaps_N / room_N, np.abs(noise.off_N) / room_N
    largest = float(off_N.max())
    gap = _rounded_up(max(LEAST.gap, largest, safety * float(np.quantile(gaps_N, FAR_PERCENTILE))))
    out_of_reach = gap >= 4 * largest
    figures = pooled(gaps_N, gap)
    flipped = max(LEAST.flipped, safety * figures.flipped / figures.tokens, 0.0 if out_of_reach else 3 / distinct)
    mean_gap = max(LEAST.mean_gap, safety * figures.gap_sum / figures.tokens)
    logprob = _rounded_up(max(LEAST.logprob, safety * float(np.quantile(off_N, FAR_PERCENTILE))))
    mean = _rounded_up(max(MEAN_OF_LOGPROB * logprob, safety * _mean_off(noise.off_N, logprob)))
    return Bounds(gap, _rounded_up(flipped), _rounded_up(mean_gap), logprob, mean, largest_logit)


def _mean_off(off_N: NDArray[np.float64], logprob: float) -> float:
    """The honest mean m of claims, nats: of the differences themselves, or what the mean of e^d makes of it."""
    d_N = np.clip(off_N, -logprob, logprob)
    return max(float(d_N.mean()), math.log(float(np.exp(d_N).mean())) / SLACK)


def propose_activation_error(figures: Sequence[ChunkFigures], safety: float) -> float:
    """Bound on the mean relative error of a proof: `safety` times what the worst honest proof needs.

    How many values may change sign or size is fixed, so there `safety` decides whether proofs can be asked for at all.
    Raises `StateError` if not: more values change than the check allows, or so many that longer honest work would reach it.
    """
    near = sum(_near_the_limit(of_group, safety) for of_group in figures)
    if near:
        raise StateError(
            f"{near} of {len(figures)} honest proofs of activations change the sign or size of more values than the check "
            f"allows, or of more than 1/{safety:g} of that: these machines, or the experts that they choose, differ too "
            'much for such proofs. Set verify.proofs = "none"'
        )
    return _rounded_up(max(LEAST_ACTIVATION_ERROR, safety * max(least_bound(of_group) for of_group in figures)))


def _near_the_limit(figures: ChunkFigures, safety: float) -> bool:
    """Whether `safety` times the values that a chunk changed would be too many. One value may change in any chunk."""
    wrong_C, most_C = figures.mismatched_C, most_mismatched(figures)
    return bool(((wrong_C > most_C) | ((wrong_C > 1) & (safety * wrong_C > most_C))).any())


def _rounded_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


class Power(NamedTuple):
    """One tenth of the tokens, grouped by the policy's entropy."""

    entropy: float
    """Mean entropy, nats per token."""
    changed: float
    """Share of tokens that another seed changes by more than the bound."""
    needed: int
    """Rollout length in such tokens from which a cheat with another seed is refused with 95 % probability."""


def power_by_entropy(
    entropy_P: NDArray[np.float64], other_gaps_P: NDArray[np.float32], bounds: Bounds, parts: int = 10
) -> list[Power]:
    """What another seed changes, by entropy, lowest first; `other_gaps_P` are the honest tokens' gaps under that seed."""
    order = np.argsort(entropy_P, kind="stable")
    return [power(entropy_P[part], other_gaps_P[part], bounds) for part in np.array_split(order, parts) if part.size]


def power(entropy_P: NDArray[np.float64], other_gaps_P: NDArray[np.float32], bounds: Bounds) -> Power:
    """The same figures over all the given tokens."""
    changed = pooled(other_gaps_P, bounds.gap).flipped / other_gaps_P.size
    return Power(float(entropy_P.mean()), changed, tokens_to_detect(changed, bounds))

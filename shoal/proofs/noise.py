"""Honest noise, measured: the bounds that it asks for, and what the bounds can then see.

Called by `shoal calibrate`, which plays and replays. It knows no model and no run file: arrays in, bounds and rows out.

Axes: N tokens, each as often as it was replayed; P tokens, once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.algos.sampling_evidence import pooled, tokens_to_detect
from shoal.algos.toploc import Figures
from shoal.errors import StateError
from shoal.proofs.checks.activations import judge, least_bound
from shoal.protocol.types import Bounds

FAR_PERCENTILE = 0.9999
"""Of the gaps, and of the differences of log-probs: what the safety factor is applied to."""

LEAST = Bounds(gap=1e-3, flipped=1e-5, mean_gap=1e-7, logprob=1e-3)
"""No bound is set below these, however quiet the machines that were measured: other hardware's float32 differs by
more than one machine from itself, and a choice that is 0.001 nats from the best gains a cheat nothing."""


LEAST_ACTIVATION_ERROR = 1e-3
"""The same for proofs of activations: a code of the next size is off by up to 0.008, and float32 elsewhere may round a
value in eight to it."""


class Noise(NamedTuple):
    """What honest tokens gave when they were replayed."""

    gaps_N: NDArray[np.float32]
    """Replay gaps, nats."""
    off_N: NDArray[np.float64]
    """|claimed - replayed| log-probs, nats."""
    figures: tuple[Figures, ...] = ()
    """Of each group's proof of activations, as often as it was replayed; none where the run asks for no proofs."""

    def activation_error(self) -> float:
        """The least bound that lets every proof pass."""
        return max(least_bound(of_group) for of_group in self.figures)

    def mismatched(self) -> float:
        """Largest share of a chunk's values that got another sign or size."""
        return max(float((of_group.mismatched_C / of_group.entries_C).max()) for of_group in self.figures)


def joined(parts: list[Noise]) -> Noise:
    """All of it together."""
    return Noise(
        np.concatenate([part.gaps_N for part in parts]),
        np.concatenate([part.off_N for part in parts]),
        tuple(of_group for part in parts for of_group in part.figures),
    )


def propose(noise: Noise, distinct: int, safety: float) -> Bounds:
    """Bounds for one pair of dtypes: `safety` times what was measured over `distinct` tokens.

    `gap` is also above the largest error of a log-prob, so that no honest token lies twice as far. A share that was
    never seen may still be 3 / distinct (the rule of three, 95 %), unless the bound is so far above the noise that no
    token can reach it: a flip's gap is at most twice the noise of a log-prob.
    """
    largest = float(noise.off_N.max())
    gap = _rounded_up(max(LEAST.gap, largest, safety * float(np.quantile(noise.gaps_N, FAR_PERCENTILE))))
    out_of_reach = gap >= 4 * largest
    figures = pooled(noise.gaps_N, gap)
    flipped = max(LEAST.flipped, safety * figures.flipped / figures.tokens, 0.0 if out_of_reach else 3 / distinct)
    mean_gap = max(LEAST.mean_gap, safety * figures.gap_sum / figures.tokens)
    logprob = max(LEAST.logprob, safety * float(np.quantile(noise.off_N, FAR_PERCENTILE)))
    return Bounds(gap, _rounded_up(flipped), _rounded_up(mean_gap), _rounded_up(logprob))


def propose_activation_error(figures: Sequence[Figures], safety: float) -> float:
    """Bound on the mean relative error of a proof: `safety` times what the worst honest one needs.

    Raises `StateError` where no bound lets them all pass: too many values have another sign or size.
    """
    bound = _rounded_up(max(LEAST_ACTIVATION_ERROR, safety * max(least_bound(of_group) for of_group in figures)))
    refused = sum(judge(of_group, bound) is not None for of_group in figures)
    if refused:
        raise StateError(
            f"{refused} of {len(figures)} honest proofs of activations give too many values another sign or size, "
            'whatever the bound: these machines differ by more than such proofs can bear; set verify.proofs = "none"'
        )
    return bound


def _rounded_up(value: float) -> float:
    """To two significant digits, never down."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


class Power(NamedTuple):
    """A tenth of the tokens, by the policy's entropy."""

    entropy: float
    """Mean, nats a token."""
    changed: float
    """Share of tokens that another seed would change, beyond the bound."""
    needed: int
    """Tokens of a rollout, all like these, at which such a cheat is refused with chance 95 %."""


def power_by_entropy(
    entropy_P: NDArray[np.float64], other_gaps_P: NDArray[np.float32], bounds: Bounds, parts: int = 10
) -> list[Power]:
    """What another seed shows, from the least to the most entropy; `other_gaps_P` are honest tokens' under that seed."""
    order = np.argsort(entropy_P, kind="stable")
    return [power(entropy_P[part], other_gaps_P[part], bounds) for part in np.array_split(order, parts) if part.size]


def power(entropy_P: NDArray[np.float64], other_gaps_P: NDArray[np.float32], bounds: Bounds) -> Power:
    """The same of all the tokens given."""
    changed = pooled(other_gaps_P, bounds.gap).flipped / other_gaps_P.size
    return Power(float(entropy_P.mean()), changed, tokens_to_detect(changed, bounds))

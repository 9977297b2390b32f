"""Statistics of claimed log-probs: whether a worker's claims lean one way by more than honest rounding does.

It depends on neither model nor protocol: differences go in, nats and bits come out.

An honest worker samples token x from p, by its own arithmetic, and claims log p(x). The validator finds log q(x). The
difference d = log p(x) - log q(x) is not 0 on average: its mean is the KL divergence of p from q. But e^-d has mean
sum p (q / p) = 1 exactly, whatever the machines, and e^d has mean 1 + chi-square, which is about e^(2 KL) if rounding is
the cause. So the product of e^-d, or of e^(d - 2 m) with m an upper bound on the mean, has mean at most 1 under honesty:
it is a likelihood ratio, and evidence against the claims (an e-process, as in `sampling_evidence`). Claims that lean by
more than 2 m a token are found in the end.

Advantages depend on what was sampled, so a sum that is weighted by their signs leans a little even if nobody lies.
Therefore 2 m is taken off in every direction. The weighted sum is needed because claims that mute good rollouts and
amplify bad ones may cancel in the plain sum.

    symbol   meaning
    d        claimed - replayed log-prob of a token, cut to [-bound, bound]; nats
    m        upper bound on the honest mean of d, from calibration; nats
    D        sum of d over a rollout, or over a group plainly or times the sign of each rollout's advantage
    T        tokens of the sum

Axes: N tokens.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.algos.sampling_evidence import LOG2_E

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

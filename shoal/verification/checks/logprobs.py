"""Log-probs: the worker claims the log-probs that the policy gives.

Catches log-probs that were invented, shifted, or taken from another model or temperature; also small shifts that all lean
one way over a rollout, or over a group, plainly or against its advantages. They would distort the importance ratio in the
loss.
Cannot see errors below the bounds, nor any error in groups that are not audited. Where the bounds leave room to bend the
ratio, the trainer does not use the claims at all (`train/behaviour_logprobs`); elsewhere clipping limits them. Small shifts
in every group are found over several groups (`algos/logprob_evidence`).
Hard, but mild within ten times the bound, and always mild for sums: another machine's arithmetic exceeds a bound a
little, never by much.

Axes: P policy tokens of a rollout, N of the group, G its rollouts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.algos.logprob_evidence import LIMIT_NATS, cut, lean
from shoal.algos.sampling_evidence import room
from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity, gravest, policy_positions

NAME = "logprobs"
SEVERITY: Severity = "hard"

MILD = 10.0
"""A difference up to this many times the bound costs the pay but is not slashed."""


class Leaning(NamedTuple):
    """Sums of a group's claimed - replayed log-probs, each cut to the bound, nats."""

    plain: float
    weighted: float
    """Times the sign of each rollout's advantage, or of each token's where steps decide it."""


def check(group: Group, ctx: Context) -> CheckFailure | None:
    return gravest(_failures(group, ctx))


def _failures(group: Group, ctx: Context) -> Iterator[CheckFailure]:
    yield from _single_tokens(group, ctx)
    if not ctx.bounds.logprob_mean:
        return
    totals_G = _totals(group, ctx)
    for index, (total, score) in enumerate(zip(totals_G, ctx.scores, strict=True)):
        excess = lean(total, len(score.logprobs_P), ctx.bounds)
        if excess > LIMIT_NATS:  # guard: leaning-rollout
            yield CheckFailure(index, -1, excess, LIMIT_NATS, "claimed log-probs lean one way, nats over", mild=True)
    tokens = sum(len(score.logprobs_P) for score in ctx.scores)
    leaning = _leaning(totals_G, group, ctx)
    for total, how in ((leaning.plain, "one way"), (leaning.weighted, "against the advantages")):
        excess = lean(total, tokens, ctx.bounds)
        if excess > LIMIT_NATS:  # guard: leaning-group
            yield CheckFailure(-1, -1, excess, LIMIT_NATS, f"the group's log-probs lean {how}, nats over", mild=True)


def leaning_of(group: Group, ctx: Context) -> Leaning:
    """The group's sums, for the verdict."""
    return _leaning(_totals(group, ctx), group, ctx)


def _leaning(totals_G: list[float], group: Group, ctx: Context) -> Leaning:
    signs = ctx.signs_of_tokens(group)
    if signs is None:
        return Leaning(float(sum(totals_G)), float(np.dot(totals_G, ctx.signs_G(group))))
    weighted = (float(np.dot(off_P, signs_P)) for off_P, signs_P in zip(_off(group, ctx), signs, strict=True))
    return Leaning(float(sum(totals_G)), sum(weighted))  # guard: claims-against-steps


def _totals(group: Group, ctx: Context) -> list[float]:
    """Sum of each rollout."""
    return [float(off_P.sum()) for off_P in _off(group, ctx)]


def _off(group: Group, ctx: Context) -> Iterator[NDArray[np.float64]]:
    """Claimed - replayed log-probs of each rollout, each cut to the bound."""
    for rollout, score in zip(group.rollouts, ctx.scores, strict=True):
        yield cut(rollout.logprobs_P().astype(np.float64) - score.logprobs_P, ctx.bounds)


def _single_tokens(group: Group, ctx: Context) -> Iterator[CheckFailure]:
    bound = ctx.bounds.logprob
    claimed_N = np.concatenate([rollout.logprobs_P() for rollout in group.rollouts]).astype(np.float64)
    off_N = np.abs(claimed_N - np.concatenate([score.logprobs_P for score in ctx.scores]))
    # guard: look-at-nan-differences
    if (off_N <= bound).all():  # rollouts are many and short: look at all of them at once
        return
    ends = np.cumsum([len(score.logprobs_P) for score in ctx.scores])
    for index, (rollout, score, off_P) in enumerate(
        zip(group.rollouts, ctx.scores, np.split(off_N, ends[:-1]), strict=True)
    ):
        off_P = off_P / room(score.largest_P, ctx.bounds.largest_logit)  # guard: large-logits-round-coarsely
        worst = int(np.argmax(off_P))
        if not off_P[worst] <= bound:  # a difference that is not a number fails too  # guard: difference-is-a-number
            figure = float(np.nan_to_num(off_P[worst], nan=1e9, posinf=1e9))
            at = int(policy_positions(rollout)[worst])
            detail = "claimed log-prob is not the policy's, nats"
            # guard: small-difference-is-mild
            yield CheckFailure(index, at, figure, bound, detail, mild=figure <= MILD * bound)

"""Sampling: every policy token is the one that the lease's seed chooses from the policy's own logits.

Catches another model, version, prompt, temperature, seed or order of rollouts, best-of-n, text that was not sampled,
and a turn ended early. Each shows as a gap between the best of logits / T + noise and the token that was written.
Cannot see a cheaper way to compute the same tokens, nor a change that never alters a choice: where the policy has
little entropy, other seeds and near versions often agree with it. A node that uses up the tolerance in every group is
found only over several groups, by adding up the figures of its verdicts (`algos/sampling_evidence`).
Hard, but mild within ten times a bound, and always mild for the sum: the noise of unknown hardware exceeds a bound a
little, never by much.

There are three figures because a cheat can get around each alone: a sum of small gaps hides one forged token in a long
group, a count of flips hides a few large gaps, and a largest gap hides many small ones (searched for at near ties). The
run sets how much noise is allowed for each pair of dtypes. A constant (`FALSE_ALARM`) sets how rarely it is more.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shoal.algos.sampling_evidence import EvidenceFigures, largest_sum, most_flipped, pooled, room
from shoal.engine.interface import PolicyScore
from shoal.protocol.messages import Bounds, Group
from shoal.verification.context import CheckFailure, Context, Severity, gravest, policy_positions

NAME = "sampling"
SEVERITY: Severity = "hard"

FAR = 2.0
"""No single token may have a gap above this many times `Bounds.gap`: a flip by noise is at most twice the noise, and
`gap` is above the noise. At 20, a worker that picks the better of nearly tied tokens gains 1 % in reward."""

MILD = 10.0
"""A token, or a count, up to this many times its bound costs the pay but is not slashed."""


def check(group: Group, ctx: Context) -> CheckFailure | None:
    return gravest(_failures(group, ctx))


def _failures(group: Group, ctx: Context) -> Iterator[CheckFailure | None]:
    far = limit_of_a_token(ctx.bounds)
    for index, (rollout, score) in enumerate(zip(group.rollouts, ctx.scores, strict=True)):
        gaps_P = gaps_of(score, ctx.bounds)
        # guard: look-at-nan-gaps
        if gaps_P.max() <= ctx.bounds.gap:  # nothing is flipped; a gap that is not a number fails this test
            continue
        positions_P = policy_positions(rollout)
        widest = int(np.argmax(gaps_P))
        # Written so that a gap that is not a number is refused.
        if not gaps_P[widest] <= far:  # guard: gap-size, gap-is-a-number
            figure = float(np.nan_to_num(gaps_P[widest], nan=1e9, posinf=1e9))
            detail = "token that its seed does not choose, nats"
            # guard: small-gap-is-mild
            yield CheckFailure(index, int(positions_P[widest]), figure, far, detail, mild=figure <= MILD * far)
        first = int(positions_P[np.argmax(gaps_P > ctx.bounds.gap)])
        yield _too_many(index, first, pooled(gaps_P, ctx.bounds.gap), ctx)  # guard: flips-of-a-rollout
    figures = figures_of(ctx)
    most = largest_sum(figures.tokens, ctx.bounds)
    if figures.gap_sum > most:  # guard: gap-sum
        yield CheckFailure(-1, -1, figures.gap_sum, most, "sum of the group's small gaps, nats", mild=True)
    yield _too_many(-1, -1, figures, ctx)  # guard: flips-of-a-group


def limit_of_a_token(bounds: Bounds) -> float:
    """The gap above which a single token is refused, nats. Above `Bounds.gap`, half of it, tokens are counted."""
    return FAR * bounds.gap


def figures_of(ctx: Context) -> EvidenceFigures:
    """The group's pooled figures, for the verdict."""
    return pooled(np.concatenate([gaps_of(score, ctx.bounds) for score in ctx.scores]), ctx.bounds.gap)


def gaps_of(score: PolicyScore, bounds: Bounds) -> NDArray[np.float32]:
    """A rollout's gaps, reduced where its logits are larger than those for which the bounds hold."""
    return score.gaps_P / room(score.largest_P, bounds.largest_logit)  # guard: large-logits-flip-coarsely


def _too_many(rollout: int, position: int, figures: EvidenceFigures, ctx: Context) -> CheckFailure | None:
    most = most_flipped(figures.tokens, ctx.bounds)
    if figures.flipped <= most:
        return None
    mild = figures.flipped <= MILD * most  # guard: few-flips-are-mild
    return CheckFailure(rollout, position, figures.flipped, most, "tokens that their seeds do not choose", mild)

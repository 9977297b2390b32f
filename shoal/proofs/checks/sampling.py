"""Sampling replayed: every policy token is the one that the lease's seed chooses from the policy's own logits.

Catches another model, version, prompt, temperature, seed or order of rollouts, best-of-n, text that was not sampled,
and a turn ended early: each shows as a gap between the best of logits / T + noise and the token that was written.
Cannot see a cheaper way to the same tokens, nor a change that never alters a choice: where the policy has little
entropy, other seeds and near versions often agree with it.
Hard, but mild within ten times a bound: numerical noise of unknown hardware reaches a little over, never far.

Three figures, because each alone can be played: a mean hides one forged token in a long group, a count of flips
hides a few large ones, and a largest gap hides many small ones (ground out at near ties).
"""

import math

import numpy as np

from shoal.proofs.context import Context, Failure, Severity, policy_positions
from shoal.protocol.types import Group

NAME = "sampling"
SEVERITY: Severity = "hard"

CLIP_NATS = 1.0
"""A gap counts at most this in the mean: one token can say no more than "not sampled"."""

FAR = 100.0
"""Times `gap_bound` that no single token may pass. A flip by noise is at most twice the noise, and `gap_bound` is set
above the noise, so a token this far off was not chosen by the seed."""

MILD = 10.0
"""Times its bound within which the mean or the count brings no pay but no slash."""


def check(group: Group, ctx: Context) -> Failure | None:
    for index, (rollout, score) in enumerate(zip(group.rollouts, ctx.scores, strict=True)):
        positions_P, gaps_P = policy_positions(rollout), score.gaps_P
        widest = int(np.argmax(gaps_P))
        bound = FAR * ctx.rules.gap_bound
        # Written so that a gap that is not a number fails.
        if not gaps_P[widest] <= bound:
            figure = float(np.nan_to_num(gaps_P[widest], nan=1e9, posinf=1e9))
            return Failure(index, int(positions_P[widest]), figure, bound, "token that its seed does not choose, nats")
        flipped = np.flatnonzero(gaps_P > ctx.rules.gap_bound)
        most = max(1, math.ceil(ctx.rules.max_flipped * gaps_P.size))
        if flipped.size > most:
            at = int(positions_P[flipped[0]])
            mild = flipped.size <= MILD * most
            return Failure(index, at, flipped.size, most, "tokens that their seeds do not choose", mild)
    gaps_N = np.concatenate([score.gaps_P for score in ctx.scores])
    mean = float(np.minimum(gaps_N, CLIP_NATS).mean())
    if mean > ctx.rules.mean_gap_bound:
        mild = mean <= MILD * ctx.rules.mean_gap_bound
        return Failure(-1, -1, mean, ctx.rules.mean_gap_bound, "mean gap of the group's tokens, nats", mild)
    return None

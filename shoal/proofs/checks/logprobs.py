"""Log-probs: the worker claims the log-probs that the policy gives.

Catches log-probs that were invented, shifted, or taken from another model or temperature. They would distort the
importance ratio in the loss.
Cannot see errors below the bound, nor any error in groups that are not audited; only clipping limits those.
Hard, but mild within ten times the bound: another machine's arithmetic exceeds it a little, never by much.

Axes: P policy tokens of a rollout, N of the group.
"""

from collections.abc import Iterator

import numpy as np

from shoal.proofs.context import Context, Failure, Severity, gravest, policy_positions
from shoal.protocol.types import Group

NAME = "logprobs"
SEVERITY: Severity = "hard"

MILD = 10.0
"""A difference up to this many times the bound costs the pay but is not slashed."""


def check(group: Group, ctx: Context) -> Failure | None:
    return gravest(_failures(group, ctx))


def _failures(group: Group, ctx: Context) -> Iterator[Failure]:
    bound = ctx.bounds.logprob
    claimed_N = np.concatenate([rollout.logprobs_P() for rollout in group.rollouts]).astype(np.float64)
    off_N = np.abs(claimed_N - np.concatenate([score.logprobs_P for score in ctx.scores]))
    # guard: look-at-nan-differences
    if (off_N <= bound).all():  # rollouts are many and short: look at all of them at once
        return
    ends = np.cumsum([len(score.logprobs_P) for score in ctx.scores])
    for index, (rollout, off_P) in enumerate(zip(group.rollouts, np.split(off_N, ends[:-1]), strict=True)):
        worst = int(np.argmax(off_P))
        if not off_P[worst] <= bound:  # a difference that is not a number fails too  # guard: difference-is-a-number
            figure = float(np.nan_to_num(off_P[worst], nan=1e9, posinf=1e9))
            at = int(policy_positions(rollout)[worst])
            detail = "claimed log-prob is not the policy's, nats"
            # guard: small-difference-is-mild
            yield Failure(index, at, figure, bound, detail, mild=figure <= MILD * bound)

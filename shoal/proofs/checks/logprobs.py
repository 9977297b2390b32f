"""Log-probs: what the worker claims for its own tokens is what the policy gives.

Catches log-probs that were invented, shifted, or taken from another model or temperature, which would bend the
importance ratio of the loss.
Cannot see errors under the bound, nor any in groups that are not audited: there only clipping limits them.
Hard, but mild within ten times the bound: another machine's arithmetic reaches a little over, never far.
"""

from collections.abc import Iterator

import numpy as np

from shoal.proofs.context import Context, Failure, Severity, gravest, policy_positions
from shoal.protocol.types import Group

NAME = "logprobs"
SEVERITY: Severity = "hard"

MILD = 10.0
"""Times the bound within which a difference brings no pay but no slash."""


def check(group: Group, ctx: Context) -> Failure | None:
    return gravest(_failures(group, ctx))


def _failures(group: Group, ctx: Context) -> Iterator[Failure]:
    bound = ctx.bounds.logprob
    for index, (rollout, score) in enumerate(zip(group.rollouts, ctx.scores, strict=True)):
        off_P = np.abs(rollout.logprobs_P().astype(np.float64) - score.logprobs_P)
        worst = int(np.argmax(off_P))
        if not off_P[worst] <= bound:  # a difference that is not a number fails too
            figure = float(np.nan_to_num(off_P[worst], nan=1e9, posinf=1e9))
            at = int(policy_positions(rollout)[worst])
            detail = "claimed log-prob is not the policy's, nats"
            yield Failure(index, at, figure, bound, detail, mild=figure <= MILD * bound)

"""Rewards: recomputed from the actions, and within the bounds that the environment declares.

Catches nothing that a worker can do, since no claim of a reward is on the wire; it catches environments that score
outside their own bounds, or with something that is not a number.
Cannot tell a deserved reward from one won by a gap in the environment's rules (reward hacking).
Soft: the fault is the environment's.
"""

import math

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.types import Group

NAME = "reward"
SEVERITY: Severity = "soft"


def check(group: Group, ctx: Context) -> Failure | None:
    low, high = ctx.env.reward_bounds
    for index, replayed in enumerate(ctx.replays(group)):
        if not math.isfinite(replayed.reward):
            return Failure(index, -1, 0, high, "environment gives a reward that is not a finite number")
        if not low <= replayed.reward <= high:
            return Failure(index, -1, replayed.reward, high, "environment gives a reward outside its bounds")
    return None

"""Rewards: recomputed from the actions, and within the bounds that the environment declares.

Catches faulty environments, not workers: a worker sends no rewards, but an environment may score outside its own
bounds, or with something that is not a number.
Cannot tell a deserved reward from one won through a gap in the environment's rules (reward hacking).
Soft: the environment is at fault.
"""

import math

from shoal.protocol.audit_selection import MAX_REWARD
from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "reward"
SEVERITY: Severity = "soft"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    low, high = ctx.reward_bounds
    for index, replayed in enumerate(ctx.replays(group)):
        if not math.isfinite(replayed.reward):
            return CheckFailure(index, -1, 0, high, "environment gives a reward that is not a finite number")
        if not low <= replayed.reward <= high:
            return CheckFailure(index, -1, replayed.reward, high, "environment gives a reward outside its bounds")
    for index, steps in enumerate(ctx.steps(group) or ()):
        largest = max((abs(step.reward) for step in steps), default=0.0)
        if largest > MAX_REWARD:  # guard: large-step-rewards
            return CheckFailure(index, -1, largest, MAX_REWARD, "environment gives a step too large a reward")
    return None

"""Completeness: all rollouts of the group are there.

Catches workers that leave out rollouts they do not like. (Leaving one out of the middle also shifts the seeds of all
that follow, which the audit sees.)
Cannot tell a copy within a group from chance. Two equal rollouts are legal, and common where the policy has little
entropy, so equality alone is never refused. Where there is entropy, a copy fails the audit under its own seed.
Soft: the submission is refused, which costs its pay, the newest unvested pay of a few blocks, and trust. It never slashes.
"""

from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "complete"
SEVERITY: Severity = "soft"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    given, due = len(group.rollouts), ctx.due
    if given != due:
        return CheckFailure(-1, -1, given, due, "rollouts of the group are missing")
    return None

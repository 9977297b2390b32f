"""Complete: all rollouts of the group are there.

Catches workers that leave out rollouts they do not like (one left out of the middle also shifts the seeds of all that
follow, which the audit sees).
Cannot tell copies within a group from chance: two rollouts alike are legal, and common where the policy has little
entropy, so they are never refused for being alike; where it has some, a copy fails the audit under its own seed.
Soft: leaving work out is a lapse, which costs pay and no more.
"""

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.types import Group

NAME = "complete"
SEVERITY: Severity = "soft"


def check(group: Group, ctx: Context) -> Failure | None:
    given, due = len(group.rollouts), ctx.rules.group_size
    if given != due:
        return Failure(-1, -1, given, due, "rollouts of the group are missing")
    return None

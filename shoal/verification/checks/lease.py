"""Lease: run, lease, policy version, slot, environment and task are those that the lease asked for.

Catches work made for another lease, slot, task, version or run, work sent again, and work that the worker chose.
Cannot see who may hold the lease, nor whether its version is still fresh: the coordinator decides both on arrival.
Hard: the lease names all of these, and an honest worker copies them.
"""

from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "lease"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    """The seed is not on the wire: it comes from the lease's slot, and the audit replays the sampling with it."""
    said = ctx.submission
    if said.run != ctx.tools.info.run:
        return CheckFailure(-1, -1, 0, 0, "submission is for another run")
    if said.lease != ctx.lease.id:
        return CheckFailure(-1, -1, 0, 0, "submission is for another lease")
    for version in (said.version, *{rollout.version for rollout in group.rollouts}):
        if version != ctx.lease.version:
            return CheckFailure(-1, -1, version, ctx.lease.version, "made with a policy version other than the lease's")
    if group.slot != ctx.slot.slot:
        return CheckFailure(-1, -1, group.slot, ctx.slot.slot, "group is for another slot than the one due here")
    if group.env != ctx.slot.env:
        return CheckFailure(-1, -1, 0, 0, "group is of another environment than the slot's")
    if group.task != ctx.slot.task:
        return CheckFailure(-1, -1, group.task, ctx.slot.task, "group is of another task than the slot's")
    return None

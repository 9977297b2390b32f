"""The environment, played again from the policy's actions: all that it says in a rollout is what it would have said.

Catches invented or altered answers, text of one author passed off as the other's, turns that go on after a stop
token, tokens after the end, and a claim that the environment failed when it does not.
Cannot judge an environment that answers the same actions differently each time.
Soft: a replay that differs may be the environment's fault, or this machine's, until another validator agrees.
"""

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.types import Group

NAME = "environment"
SEVERITY: Severity = "soft"


def check(group: Group, ctx: Context) -> Failure | None:
    """A failing environment counts here too, whoever saw it fail; other faults of the end are the check `ending`'s."""
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        inside = 0 <= replayed.position < rollout.tokens_T().size
        if replayed.problem and (inside or "error" in (rollout.ending, replayed.ending)):
            return Failure(index, replayed.position, 0, 0, f"environment replayed: {replayed.problem}")
    return None

"""Environment: replay it with the policy's actions, and require the words that the rollout says it spoke.

Catches invented or altered answers, text attributed to the wrong author, turns that continue after a stop token,
tokens after the end, and a claim that the environment failed when it does not fail.
Cannot judge an environment that answers the same actions differently each time.
Soft: a difference may be the fault of the environment, or of this machine, until another validator agrees.
"""

from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "environment"
SEVERITY: Severity = "soft"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    """An environment that fails for the worker or for this validator counts here too.

    The check `ending` reports other problems of the end. Where the host plays, the rollout is compared with its record.
    """
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        inside = 0 <= replayed.position < rollout.tokens_T().size or ctx.record is not None  # guard: record-is-compared
        if replayed.problem and (inside or "error" in (rollout.ending, replayed.ending)):
            return CheckFailure(index, replayed.position, 0, 0, f"environment replayed: {replayed.problem}")
    return None

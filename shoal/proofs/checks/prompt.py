"""Prompt: every rollout opens with exactly the tokens that environment, task and chat template give.

Catches prompts that were edited, lengthened, cut, or taken from another task.
Cannot see what the policy was really shown; the audit replays that.
Hard: the opening follows from the lease alone.
"""

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.types import POLICY, Group

NAME = "prompt"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> Failure | None:
    """The replay builds the conversation from the task. A difference before the first turn is in the prompt."""
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        if replayed.problem and 0 <= replayed.position <= rollout.author.index(POLICY):
            return Failure(index, replayed.position, 0, 0, f"prompt is not the task's: {replayed.problem}")
    return None

"""The prompt: every rollout opens with the tokens that environment, task and chat template give, and no others.

Catches prompts that were edited, lengthened, cut, or taken from another task.
Cannot see what the policy was really shown: that the audit replays.
Hard: the opening follows from the lease alone.
"""

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.types import POLICY, Group

NAME = "prompt"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> Failure | None:
    """The replay grows the conversation from the task; where it first differs, up to the first turn, is the prompt."""
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        if replayed.problem and 0 <= replayed.position <= rollout.author.index(POLICY):
            return Failure(index, replayed.position, 0, 0, f"prompt is not the task's: {replayed.problem}")
    return None

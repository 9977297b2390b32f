"""Prompt: every rollout opens with exactly the tokens that environment, task and chat template give, or continues the
rollout that it must, from where it must.

Catches prompts that were edited, lengthened, cut, or taken from another task.
Cannot see what the policy was really shown; the audit replays that.
Hard: the opening follows from the lease and the environment's data. The detail names the prompt derived here: the rules
slash only if two validators derived the same one, so data that differ between machines slash nobody by chance.
"""

from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "prompt"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    """The replay builds the conversation from the task. A difference before the first turn, as the claim or the task has
    it, is in the prompt."""
    for index, (rollout, replayed) in enumerate(zip(group.rollouts, ctx.replays(group), strict=True)):
        if not replayed.problem or replayed.position < 0:
            continue
        prompt, end = ctx.prompt(index, rollout)
        if replayed.position < end:
            name = digest(to_json(prompt))[:16]
            return CheckFailure(
                index, replayed.position, 0, 0, f"prompt is not the task's ({name}): {replayed.problem}"
            )
    return None

"""Ending: a rollout ends where the run's rules end it, and for the reason that it states.

Catches rollouts cut short to save work or to hide what followed, and endings that were not reached: a turn ends with a
stop token or at its limit, and a rollout ends when the environment is done or nothing more fits.
Cannot see a stop token placed where the policy would have continued. The audit sees that as a gap at the token.
Hard: endings follow from the tokens and the rules, by counting.
"""

from shoal.protocol.messages import Group
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "ending"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    """Report every problem that the replay found at the rollout's end and that no earlier check reported."""
    for index, replayed in enumerate(ctx.replays(group)):
        if replayed.problem:
            return CheckFailure(index, replayed.position, 0, 0, f"ending: {replayed.problem}")
    return None

"""The ending: a rollout ends where the rules of the run end it, and for the reason it gives.

Catches rollouts cut short for cheap or to hide what followed, and endings that were not reached: a turn ends with a
stop token or at its limit, and a rollout when the environment is done or nothing more fits.
Cannot see a stop token put where the policy would have gone on: the audit sees it, as a gap at that token.
Hard: endings follow from the tokens and the rules, by counting.
"""

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.types import Group

NAME = "ending"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> Failure | None:
    """All that the replay found and that no earlier check took for its own lies at the end of the rollout."""
    for index, replayed in enumerate(ctx.replays(group)):
        if replayed.problem:
            return Failure(index, replayed.position, 0, 0, f"ending: {replayed.problem}")
    return None

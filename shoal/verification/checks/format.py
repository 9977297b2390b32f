"""Shape and limits: sizes agree, tokens are in the vocabulary, numbers are numbers, turns keep to the run's limits.

Catches malformed, oversized and padded rollouts, turns longer than the limit, and log-probs that no softmax gives.
Cannot tell a well-formed invention from a sampled rollout.
Hard: an honest worker never makes such bytes (`encode_submission` refuses to send a log-prob that is not finite).

What a model may read is judged by `protocol/rollout_validation`, with the function that the trainer uses. The rest are
rules of play.

Axes: G rollouts of the group, N tokens of all rollouts in a row, R runs of policy tokens.
"""

import numpy as np

from shoal.protocol.constants import MAX_GROUP_ROLLOUTS
from shoal.protocol.messages import ENVIRONMENT, Group, Rollout
from shoal.protocol.rollout_validation import flaw_of
from shoal.verification.context import CheckFailure, Context, Severity

NAME = "shape"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> CheckFailure | None:
    """Every later check relies on this one: after it, arrays can be read and indexed without further tests."""
    most = min(ctx.due, MAX_GROUP_ROLLOUTS)
    if len(group.rollouts) > most:
        return CheckFailure(-1, -1, len(group.rollouts), most, "more rollouts than the group size")
    versions = {rollout.version for rollout in group.rollouts}
    if len(versions) > 1:
        return CheckFailure(-1, -1, len(versions), 1, "rollouts of more than one policy version in a group")
    flaw = flaw_of(
        group.rollouts, vocabulary=ctx.tools.renderer.vocabulary, max_tokens=ctx.sampling.max_tokens,
        max_rollout_tokens=ctx.sampling.max_rollout_tokens,
    )  # fmt: skip
    if flaw is not None:  # guard: rollouts-have-no-flaw
        return CheckFailure(*flaw)
    return _turns(group.rollouts, ctx.sampling.max_turn_tokens) if group.rollouts else None


def _turns(rollouts: tuple[Rollout, ...], limit: int) -> CheckFailure | None:
    """Check the policy's turns in all rollouts as one array: with many short rollouts, a look at each costs more."""
    for index, rollout in enumerate(rollouts):
        if not rollout.num_policy_tokens():  # guard: policy-says-something
            return CheckFailure(index, 0, 0, 1, "a rollout must hold a turn of the policy")
    policy_N = np.frombuffer(b"".join(rollout.author for rollout in rollouts), dtype="u1") != ENVIRONMENT
    # No run of policy tokens crosses into the next row, because every row opens with the environment's text.
    edges = np.flatnonzero(np.diff(policy_N, append=False))
    start_R, length_R = edges[::2] + 1, edges[1::2] - edges[::2]
    longest = int(length_R.argmax())
    if length_R[longest] > limit:  # guard: turn-length
        start_G = np.cumsum([0, *(len(rollout.author) for rollout in rollouts)])[:-1]
        at = int(start_R[longest])
        index = int(np.searchsorted(start_G, at, side="right")) - 1
        place = at - int(start_G[index])
        return CheckFailure(index, place, int(length_R[longest]), limit, "turn longer than max_turn_tokens")
    return None

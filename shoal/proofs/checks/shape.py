"""Shape and limits: sizes that agree, known tokens, numbers that are numbers.

Catches malformed, oversized and padded rollouts, turns longer than the limit, and log-probs that no softmax gives.
Cannot tell a well-formed invention from a sampled rollout.
Hard: the prover's side never makes such bytes (it refuses to send a log-prob that is not finite).
"""

import numpy as np

from shoal.proofs.context import Context, Failure, Severity, policy_positions
from shoal.protocol.constants import MAX_GROUP_ROLLOUTS, MAX_ROLLOUT_TOKENS
from shoal.protocol.types import ENVIRONMENT, POLICY, Group, Rollout

NAME = "shape"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> Failure | None:
    """Every later check relies on this one: afterwards arrays can be read and indexed without looking again."""
    most = min(ctx.rules.group_size, MAX_GROUP_ROLLOUTS)
    if len(group.rollouts) > most:
        return Failure(-1, -1, len(group.rollouts), most, "more rollouts than the group size")
    versions = {rollout.version for rollout in group.rollouts}
    if len(versions) > 1:
        return Failure(-1, -1, len(versions), 1, "rollouts of more than one policy version in a group")
    for index, rollout in enumerate(group.rollouts):
        failure = _sizes(index, rollout, ctx) or _tokens(index, rollout, ctx) or _logprobs(index, rollout, ctx)
        if failure is not None:
            return failure
    return None


def _sizes(index: int, rollout: Rollout, ctx: Context) -> Failure | None:
    if len(rollout.token_ids) % 4 or len(rollout.logprobs) % 4:
        return Failure(index, -1, 0, 0, "token ids or log-probs are not a whole number of 4-byte values")
    num_tokens = len(rollout.token_ids) // 4
    limit = min(ctx.sampling.max_tokens, MAX_ROLLOUT_TOKENS)
    if num_tokens > limit:
        return Failure(index, limit, num_tokens, limit, "more tokens than max_tokens")
    if len(rollout.author) != num_tokens:
        return Failure(index, -1, len(rollout.author), num_tokens, "authors do not match tokens one to one")
    return None


def _tokens(index: int, rollout: Rollout, ctx: Context) -> Failure | None:
    tokens_T, author_T = rollout.tokens_T(), rollout.author_T()
    unknown_T = (tokens_T < 0) | (tokens_T >= ctx.tools.renderer.vocabulary)
    if unknown_T.any():
        at = int(unknown_T.argmax())
        return Failure(index, at, int(tokens_T[at]), ctx.tools.renderer.vocabulary, "token id outside the vocabulary")
    policy_T = author_T == POLICY
    odd_T = ~policy_T & (author_T != ENVIRONMENT)
    if odd_T.any():
        at = int(odd_T.argmax())
        return Failure(index, at, int(author_T[at]), POLICY, "author is neither environment nor policy")
    if not policy_T.size or policy_T[0] or not policy_T.any():
        return Failure(index, 0, 0, 1, "a rollout opens with the environment's text and holds a turn of the policy")
    start, length = _longest_turn(policy_T)
    if length > ctx.sampling.max_turn_tokens:
        return Failure(index, start, length, ctx.sampling.max_turn_tokens, "turn longer than max_turn_tokens")
    return None


def _logprobs(index: int, rollout: Rollout, ctx: Context) -> Failure | None:
    logprobs_P, num_policy = rollout.logprobs_P(), rollout.num_policy_tokens()
    if logprobs_P.size != num_policy:
        return Failure(index, -1, logprobs_P.size, num_policy, "not one log-prob for each policy token")
    # Rounding may put a certain token's log-prob just above 0; how much rounding passes is the run's own bound.
    bound = ctx.bounds.logprob
    odd_P = ~(logprobs_P <= bound) | (logprobs_P == -np.inf)
    if not odd_P.any():
        return None
    first = int(odd_P.argmax())
    position, value = int(policy_positions(rollout)[first]), float(logprobs_P[first])
    if not np.isfinite(value):
        return Failure(index, position, 0, 0, "log-prob is not a finite number")
    return Failure(index, position, value, bound, "log-prob above 0")


def _longest_turn(policy_T: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of policy tokens; the first token is not one of them."""
    (edges,) = np.nonzero(policy_T[1:] != policy_T[:-1])  # it opens with the environment's text
    edges = np.append(edges + 1, len(policy_T))
    starts, ends = edges[: len(edges) // 2 * 2 : 2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])

"""Shape and limits: sizes that agree, known tokens, numbers that are numbers.

Catches malformed, oversized and padded rollouts, turns longer than the limit, and log-probs that no softmax gives.
Cannot tell a well-formed invention from a sampled rollout.
Hard: the prover's side never makes such bytes (it refuses to send a log-prob that is not finite).
"""

import numpy as np

from shoal.proofs.context import Context, Failure, Severity
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
    unknown = np.flatnonzero((tokens_T < 0) | (tokens_T >= ctx.tools.renderer.vocabulary))
    if unknown.size:
        at = int(unknown[0])
        return Failure(index, at, int(tokens_T[at]), ctx.tools.renderer.vocabulary, "token id outside the vocabulary")
    odd = np.flatnonzero((author_T != ENVIRONMENT) & (author_T != POLICY))
    if odd.size:
        at = int(odd[0])
        return Failure(index, at, int(author_T[at]), POLICY, "author is neither environment nor policy")
    if not author_T.size or author_T[0] == POLICY or not (author_T == POLICY).any():
        return Failure(index, 0, 0, 1, "a rollout opens with the environment's text and holds a turn of the policy")
    start, length = _longest_turn(author_T == POLICY)
    if length > ctx.sampling.max_turn_tokens:
        return Failure(index, start, length, ctx.sampling.max_turn_tokens, "turn longer than max_turn_tokens")
    return None


def _logprobs(index: int, rollout: Rollout, ctx: Context) -> Failure | None:
    logprobs_P = rollout.logprobs_P()
    positions_P = np.flatnonzero(rollout.author_T() == POLICY)
    if logprobs_P.size != positions_P.size:
        return Failure(index, -1, logprobs_P.size, positions_P.size, "not one log-prob for each policy token")
    odd = np.flatnonzero(~np.isfinite(logprobs_P))
    if odd.size:
        return Failure(index, int(positions_P[odd[0]]), 0, 0, "log-prob is not a finite number")
    # Rounding may put a certain token's log-prob just above 0; how much rounding passes is the run's own bound.
    worst = int(np.argmax(logprobs_P))
    bound = ctx.bounds.logprob
    if logprobs_P[worst] > bound:
        return Failure(index, int(positions_P[worst]), float(logprobs_P[worst]), bound, "log-prob above 0")
    return None


def _longest_turn(policy_T: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of policy tokens."""
    edges = np.diff(np.concatenate(([0], policy_T.astype(np.int8), [0])))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int((ends - starts)[longest])

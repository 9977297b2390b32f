"""Shape and limits: sizes agree, tokens are in the vocabulary, numbers are numbers.

Catches malformed, oversized and padded rollouts, turns longer than the limit, and log-probs that no softmax gives.
Cannot tell a well-formed invention from a sampled rollout.
Hard: an honest worker never makes such bytes (`commit` refuses to send a log-prob that is not finite).

Axes: G rollouts of the group, N tokens of all rollouts in a row, L log-probs of all rollouts, R runs of policy tokens.
"""

import numpy as np
from numpy.typing import NDArray

from shoal.proofs.context import Context, Failure, Severity
from shoal.protocol.constants import MAX_GROUP_ROLLOUTS, MAX_LOGPROB, MAX_ROLLOUT_TOKENS
from shoal.protocol.types import ENVIRONMENT, POLICY, Group, Rollout

NAME = "shape"
SEVERITY: Severity = "hard"


def check(group: Group, ctx: Context) -> Failure | None:
    """Every later check relies on this one: after it, arrays can be read and indexed without further tests."""
    most = min(ctx.rules.group_size, MAX_GROUP_ROLLOUTS)
    if len(group.rollouts) > most:
        return Failure(-1, -1, len(group.rollouts), most, "more rollouts than the group size")
    versions = {rollout.version for rollout in group.rollouts}
    if len(versions) > 1:
        return Failure(-1, -1, len(versions), 1, "rollouts of more than one policy version in a group")
    for index, rollout in enumerate(group.rollouts):
        failure = _sizes(index, rollout, ctx)
        if failure is not None:
            return failure
    return _values(group.rollouts, ctx) if group.rollouts else None


def _sizes(index: int, rollout: Rollout, ctx: Context) -> Failure | None:
    if len(rollout.token_ids) % 4 or len(rollout.logprobs) % 4:  # guard: whole-arrays
        return Failure(index, -1, 0, 0, "token ids or log-probs are not a whole number of 4-byte values")
    num_tokens = len(rollout.token_ids) // 4
    limit = min(ctx.sampling.max_tokens, MAX_ROLLOUT_TOKENS)
    if num_tokens > limit:  # guard: rollout-length
        return Failure(index, limit, num_tokens, limit, "more tokens than max_tokens")
    num_policy, num_logprobs = rollout.num_policy_tokens(), len(rollout.logprobs) // 4
    # guard: author-of-each-token, author-is-one-of-two
    if not num_policy + rollout.author.count(ENVIRONMENT) == len(rollout.author) == num_tokens:
        return Failure(index, -1, len(rollout.author), num_tokens, "each token needs one author, environment or policy")
    if not num_policy or rollout.author[0] == POLICY:  # guard: policy-does-not-open, policy-says-something
        return Failure(index, 0, 0, 1, "a rollout must open with the environment's text and hold a turn of the policy")
    if num_logprobs != num_policy:  # guard: logprob-of-each-token
        return Failure(index, -1, num_logprobs, num_policy, "not one log-prob for each policy token")
    return None


def _values(rollouts: tuple[Rollout, ...], ctx: Context) -> Failure | None:
    """Check all rollouts as one array, since their sizes agree: with many short rollouts, a look at each costs more."""
    start_G = np.cumsum([0, *(len(rollout.author) for rollout in rollouts)])[:-1]

    def failure(at: int, figure: float, bound: float, detail: str) -> Failure:
        index = int(np.searchsorted(start_G, at, side="right")) - 1
        return Failure(index, at - int(start_G[index]), figure, bound, detail)

    tokens_N: NDArray[np.int32] = np.frombuffer(b"".join(rollout.token_ids for rollout in rollouts), dtype="<i4")
    vocabulary = ctx.tools.renderer.vocabulary
    if tokens_N.min() < 0 or tokens_N.max() >= vocabulary:  # guard: token-not-negative, token-in-vocabulary
        at = int(np.argmax((tokens_N < 0) | (tokens_N >= vocabulary)))
        return failure(at, int(tokens_N[at]), vocabulary, "token id outside the vocabulary")
    policy_N = np.frombuffer(b"".join(rollout.author for rollout in rollouts), dtype="u1") == POLICY
    # No run of policy tokens crosses into the next rollout, because every rollout opens with the environment's text.
    edges = np.flatnonzero(np.diff(policy_N, append=False))
    start_R, length_R = edges[::2] + 1, edges[1::2] - edges[::2]
    longest = int(length_R.argmax())
    if length_R[longest] > ctx.sampling.max_turn_tokens:  # guard: turn-length
        length, limit = int(length_R[longest]), ctx.sampling.max_turn_tokens
        return failure(int(start_R[longest]), length, limit, "turn longer than max_turn_tokens")
    logprobs_L: NDArray[np.float32] = np.frombuffer(b"".join(rollout.logprobs for rollout in rollouts), dtype="<f4")
    # guard: logprob-is-a-number, logprob-is-learnable, logprob-is-finite
    odd_L = ~(logprobs_L <= MAX_LOGPROB) | (logprobs_L == -np.inf)
    if odd_L.any():
        first = int(odd_L.argmax())
        at, value = int(np.flatnonzero(policy_N)[first]), float(logprobs_L[first])
        if not np.isfinite(value):
            return failure(at, 0, 0, "log-prob is not a finite number")
        return failure(at, value, MAX_LOGPROB, "log-prob above 0")
    return None

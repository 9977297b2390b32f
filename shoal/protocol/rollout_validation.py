"""Which bytes of rollouts a model may read: the one judgement that validators, the trainer and `shoal calibrate` share.

So what a validator accepts, the trainer can learn from. Pure: limits are arguments. It does not check lease, environment or
rules of play; the checks of `verification` add those.

Axes: G rollouts, N tokens of all rollouts in a row, L log-probs of all rollouts.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.constants import MAX_LOGPROB, MAX_ROLLOUT_ROWS, MAX_ROLLOUT_TOKENS
from shoal.protocol.continuations import num_rollouts
from shoal.protocol.encoding import WireError, from_msgpack
from shoal.protocol.message_sizes import group_bytes
from shoal.protocol.messages import ENVIRONMENT, Group, Rollout, Rules, Sampling


class Flaw(NamedTuple):
    """Why a rollout must not reach a model."""

    rollout: int
    """Index of the rollout."""
    position: int
    """Absolute index of the token; -1 if it is none in particular."""
    figure: float
    bound: float
    """Both 0 where there is nothing to compare."""
    detail: str

    def __str__(self) -> str:
        """For example: rollout 3, token 17: token id outside the vocabulary, 70, limit 64."""
        token = f", token {self.position}" if self.position >= 0 else ""
        compared = f", {self.figure:g}, limit {self.bound:g}" if self.bound else ""
        return f"rollout {self.rollout}{token}: {self.detail}{compared}"


def flaw_of(
    rollouts: Sequence[Rollout], *, vocabulary: int, max_tokens: int, max_rollout_tokens: int = 0
) -> Flaw | None:
    """The first flaw of these rollouts; None if there is none. Then their arrays agree with each other and can be indexed,
    token ids are of the vocabulary, and log-probs are finite. Limits are those of `Sampling`."""
    for index, rollout in enumerate(rollouts):
        flaw = _sizes(index, rollout, max_tokens, max_rollout_tokens) or _rows(index, rollout, max_tokens)
        if flaw is not None:
            return flaw
    return _values(rollouts, vocabulary) if rollouts else None


def _sizes(index: int, rollout: Rollout, max_tokens: int, max_rollout_tokens: int) -> Flaw | None:
    if len(rollout.token_ids) % 4 or len(rollout.logprobs) % 4:  # guard: whole-arrays
        return Flaw(index, -1, 0, 0, "token ids or log-probs are not a whole number of 4-byte values")
    num_tokens = len(rollout.token_ids) // 4
    limit = min(max_rollout_tokens or max_tokens, MAX_ROLLOUT_TOKENS)
    if num_tokens > limit:  # guard: rollout-length
        name = "max_rollout_tokens" if max_rollout_tokens else "max_tokens"
        return Flaw(index, limit, num_tokens, limit, f"more tokens than {name}")
    num_policy, num_logprobs = rollout.num_policy_tokens(), len(rollout.logprobs) // 4
    if len(rollout.author) != num_tokens:  # guard: author-of-each-token
        return Flaw(index, -1, len(rollout.author), num_tokens, "not one author for each token")
    if num_policy + rollout.author.count(ENVIRONMENT) != len(rollout.author):  # guard: author-is-one-of-two
        return Flaw(index, -1, 0, 0, "an author other than environment or policy")
    if not num_tokens or rollout.author[0] != ENVIRONMENT:  # guard: policy-does-not-open
        return Flaw(index, 0, 0, 0, "a rollout must open with the environment's text, because nothing predicts token 0")
    if num_logprobs != num_policy:  # guard: logprob-of-each-token
        return Flaw(index, -1, num_logprobs, num_policy, "not one log-prob for each policy token")
    return None


def _rows(index: int, rollout: Rollout, max_tokens: int) -> Flaw | None:
    """A row is a rollout by itself: it opens with the environment's text, and the policy writes in it."""
    num_rows = 1 + len(rollout.starts)
    if num_rows > MAX_ROLLOUT_ROWS:  # guard: rows-of-a-rollout
        return Flaw(index, -1, num_rows, MAX_ROLLOUT_ROWS, "more rows than a rollout may have")
    edges = (0, *rollout.starts, len(rollout.author))
    for begin, end in pairwise(edges):
        if not begin < end:  # guard: rows-begin-in-order
            return Flaw(index, -1, 0, 0, "rows do not begin one after another within the rollout")
    for begin, end in pairwise(edges):
        if end - begin > max_tokens:  # guard: row-length
            return Flaw(index, begin + max_tokens, end - begin, max_tokens, "a row of more tokens than max_tokens")
        if begin and rollout.author[begin] != ENVIRONMENT:  # guard: policy-opens-no-row
            return Flaw(index, begin, 0, 0, "a row must open with the environment's text, because nothing predicts its "
                        "first token")  # fmt: skip
        if num_rows > 1 and not any(rollout.author[begin:end]):  # guard: policy-says-something-in-each-row
            return Flaw(index, begin, 0, 0, "a row in which the policy writes nothing")
    return None


def _values(rollouts: Sequence[Rollout], vocabulary: int) -> Flaw | None:
    """Check all rollouts as one array, since their sizes agree: with many short rollouts, a look at each costs more."""
    start_G = np.cumsum([0, *(len(rollout.author) for rollout in rollouts)])[:-1]

    def flaw(at: int, figure: float, bound: float, detail: str) -> Flaw:
        index = int(np.searchsorted(start_G, at, side="right")) - 1
        return Flaw(index, at - int(start_G[index]), figure, bound, detail)

    tokens_N: NDArray[np.int32] = np.frombuffer(b"".join(rollout.token_ids for rollout in rollouts), dtype="<i4")
    if tokens_N.min() < 0 or tokens_N.max() >= vocabulary:  # guard: token-not-negative, token-in-vocabulary
        at = int(np.argmax((tokens_N < 0) | (tokens_N >= vocabulary)))
        return flaw(at, int(tokens_N[at]), vocabulary, "token id outside the vocabulary")
    logprobs_L: NDArray[np.float32] = np.frombuffer(b"".join(rollout.logprobs for rollout in rollouts), dtype="<f4")
    # guard: logprob-is-a-number, logprob-is-learnable, logprob-is-finite
    odd_L = ~(logprobs_L <= MAX_LOGPROB) | (logprobs_L == -np.inf)
    if odd_L.any():
        first = int(odd_L.argmax())
        author_N = np.frombuffer(b"".join(rollout.author for rollout in rollouts), dtype="u1")
        at, value = int(np.flatnonzero(author_N != ENVIRONMENT)[first]), float(logprobs_L[first])
        if not np.isfinite(value):
            return flaw(at, 0, 0, "log-prob is not a finite number")
        return flaw(at, value, MAX_LOGPROB, "log-prob above 0")
    return None


ROOM_REMEDY = "Raise that key, or give shorter prompts"
"""What to change if a prompt leaves no room."""
ENV_REMEDY = "Correct task() and reset() of the environment (`shoal env check` with the run file shows more)"
"""What to change if a task cannot begin for another reason."""
MODEL_REMEDY = "Use a model whose chat template and tokenizer take its messages"
"""What to change if the policy cannot be shown a task."""

_NOT_SHOWN = re.compile(r"cannot begin.*: the (policy's )?(chat template|tokenizer|model has a chat template) ")
_NO_ROOM = re.compile(
    r"(task \d+ of .{1,40} cannot begin: )?its prompt takes \d+ tokens, and \S+ = \d+ leaves no room for a turn"
)


def no_room(env_max_tokens: int, sampling: Sampling, prompt_tokens: int) -> str:
    """Why the policy could not write after a prompt of so many tokens; empty if it could. `env_max_tokens` is the
    environment's own limit, 0 if it has none."""
    own = env_max_tokens or sampling.max_tokens
    key = "envs.max_tokens" if own < sampling.max_tokens else "sampling.max_tokens"
    most = min(own, sampling.max_tokens)
    if prompt_tokens < most:
        return ""
    return f"its prompt takes {prompt_tokens} tokens, and {key} = {most} leaves no room for a turn"


def unbegun_remedy(why: str) -> str:
    """What to change if tasks can never begin for this reason, as a sentence without its stop."""
    if _NO_ROOM.fullmatch(why):
        return ROOM_REMEDY
    if _NOT_SHOWN.search(why):
        return MODEL_REMEDY
    return ENV_REMEDY


# --- parents of continuations ---


def most_bytes(rules: Rules, sampling: Sampling, slot: int) -> int:
    """Most bytes that an honest group of a slot can have."""
    return group_bytes(num_rollouts(rules, slot)[1], sampling.all_tokens)


def readable_parent(data: bytes, rules: Rules, sampling: Sampling, vocabulary: int) -> Group | None:
    """The accepted group that these bytes are; None if no model may read it: then nothing is due in the slot that would
    continue it. A validator that lies may accept anything, and all who read it find the same, so nobody stops at it."""
    if len(data) > most_bytes(rules, sampling, 0):  # guard: parents-of-usual-size
        return None
    try:
        group = from_msgpack(data, Group)
    except WireError:
        return None  # guard: any-bytes-may-be-a-parent
    flaw = flaw_of(
        group.rollouts, vocabulary=vocabulary, max_tokens=sampling.max_tokens,
        max_rollout_tokens=sampling.max_rollout_tokens,
    )  # fmt: skip
    # guard: parents-are-sound
    return group if flaw is None and len(group.rollouts) <= rules.group_size else None

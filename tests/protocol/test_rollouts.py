"""Which rollouts a model may read: each flaw is found and located, and its text says what and how much."""

import msgspec
import pytest

from shoal.protocol.constants import MAX_LOGPROB, MAX_ROLLOUT_TOKENS
from shoal.protocol.rollouts import flaw_of
from shoal.protocol.types import make_rollout

HONEST = make_rollout([5, 6, 7, 8], [0, 1, 0, 1], [-1.0, MAX_LOGPROB], version=3, ending="stop")
SILENT = make_rollout([5, 6], [0, 0], [], version=3, ending="length")
LIMITS = {"vocabulary": 64, "max_tokens": 8}


def changed(**arrays):
    values = {"tokens_T": HONEST.tokens_T(), "author_T": HONEST.author_T(), "logprobs_P": HONEST.logprobs_P()}
    return make_rollout(**(values | arrays), version=3, ending="stop")


@pytest.mark.parametrize("rollouts", [(), (HONEST,), (SILENT,), (SILENT, HONEST, HONEST)])
def test_sound_rollouts_have_no_flaw_though_the_policy_says_nothing(rollouts):
    assert flaw_of(rollouts, **LIMITS) is None


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (msgspec.structs.replace(HONEST, logprobs=b"\0"), "rollout 1: token ids or log-probs are not a whole number"),
        (changed(tokens_T=[5] * 9), "rollout 1, token 8: more tokens than max_tokens, 9, limit 8"),
        (changed(author_T=[0, 1, 1]), "rollout 1: not one author for each token, 3, limit 4"),
        (changed(author_T=[0, 1, 3, 1]), "rollout 1: an author other than environment or policy"),
        (changed(author_T=[1, 1, 0, 0]), "rollout 1, token 0: a rollout must open with the environment's text"),
        (changed(tokens_T=[], author_T=[], logprobs_P=[]), "rollout 1, token 0: a rollout must open"),
        (changed(logprobs_P=[-1.0]), "rollout 1: not one log-prob for each policy token, 1, limit 2"),
        (changed(tokens_T=[5, 6, 64, 8]), "rollout 1, token 2: token id outside the vocabulary, 64, limit 64"),
        (changed(tokens_T=[5, 6, 7, -1]), "rollout 1, token 3: token id outside the vocabulary, -1, limit 64"),
        (changed(logprobs_P=[-1.0, float("nan")]), "rollout 1, token 3: log-prob is not a finite number"),
        (changed(logprobs_P=[-float("inf"), -1.0]), "rollout 1, token 1: log-prob is not a finite number"),
        (changed(logprobs_P=[-1.0, 0.5]), "rollout 1, token 3: log-prob above 0, 0.5, limit 0.001"),
    ],
)
def test_a_flaw_is_located_and_put_in_words(bad, said):
    assert str(flaw_of((HONEST, bad, HONEST), **LIMITS)).startswith(said)


def test_the_protocols_own_limit_holds_where_the_run_allows_more():
    long = make_rollout([5] * (MAX_ROLLOUT_TOKENS + 1), [0] * (MAX_ROLLOUT_TOKENS + 1), [], version=3, ending="length")
    flaw = flaw_of((long,), vocabulary=64, max_tokens=2 * MAX_ROLLOUT_TOKENS)
    assert flaw is not None and flaw.bound == MAX_ROLLOUT_TOKENS

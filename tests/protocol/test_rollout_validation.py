"""Which rollouts a model may read: each flaw is found and located, and its text says what and how much."""

import msgspec
import pytest

from shoal.protocol.constants import MAX_LOGPROB, MAX_ROLLOUT_ROWS, MAX_ROLLOUT_TOKENS
from shoal.protocol.encoding import WireError, from_msgpack, to_msgpack
from shoal.protocol.messages import Rollout, make_rollout
from shoal.protocol.rollout_validation import flaw_of

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


TWO_ROWS = make_rollout(
    [5, 6, 7, 8, 9], [0, 1, 0, 1, 2], [-1.0, -1.0, -1.0], version=3, ending="stop", starts=(2,)
)  # fmt: skip


def test_a_row_is_a_sequence_of_its_own():
    first, second = TWO_ROWS.rows()
    assert (first.tokens_T.tolist(), first.author_T.tolist(), len(first.logprobs_P), first.start) == (
        [5, 6],
        [0, 1],
        1,
        0,
    )
    assert (second.tokens_T.tolist(), second.author_T.tolist(), len(second.logprobs_P)) == ([7, 8, 9], [0, 1, 2], 2)
    assert second.start == 2 and HONEST.rows()[0].tokens_T.tolist() == [5, 6, 7, 8]
    most = tuple(range(2, 2 * MAX_ROLLOUT_ROWS, 2))
    full = make_rollout([5] * 2 * MAX_ROLLOUT_ROWS, [0, 1] * MAX_ROLLOUT_ROWS, [-1.0] * MAX_ROLLOUT_ROWS, version=3,
                        ending="stop", starts=most)  # fmt: skip
    for sound in (TWO_ROWS, full):
        assert flaw_of((sound,), vocabulary=64, max_tokens=3, max_rollout_tokens=2 * MAX_ROLLOUT_ROWS) is None
    one_more = msgspec.structs.replace(full, starts=(1, *most))
    assert "more rows than" in str(flaw_of((one_more,), vocabulary=64, max_tokens=3, max_rollout_tokens=512))


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ((2, 2), "rows do not begin one after another"),
        ((3, 2), "rows do not begin one after another"),
        ((0,), "rows do not begin one after another"),
        ((-1,), "rows do not begin one after another"),
        ((5,), "rows do not begin one after another"),
        ((2**63,), "rows do not begin one after another"),
        ((1,), "token 0: a row in which the policy writes nothing"),
        ((2, 4), "token 4: a row must open with the environment's text"),
    ],
)
def test_rows_that_begin_elsewhere_are_a_flaw(starts, said):
    bad = msgspec.structs.replace(TWO_ROWS, starts=starts)
    assert said in str(flaw_of((HONEST, bad), vocabulary=64, max_tokens=8))


def test_a_list_of_starts_is_refused_before_it_is_read():
    """Each byte of a list of small numbers takes 16 bytes of memory: 64 MiB would take a gigabyte."""
    bad = msgspec.structs.replace(TWO_ROWS, starts=(2,) * 1000)
    with pytest.raises(WireError, match="length <= 127"):
        from_msgpack(to_msgpack(bad), Rollout)
    good = msgspec.structs.replace(TWO_ROWS, starts=(2,) * 127)
    assert from_msgpack(to_msgpack(good), Rollout) == good


def test_each_row_and_all_rows_together_have_a_limit():
    bad = str(flaw_of((TWO_ROWS,), vocabulary=64, max_tokens=2, max_rollout_tokens=8))
    assert bad == "rollout 0, token 4: a row of more tokens than max_tokens, 3, limit 2"
    bad = str(flaw_of((TWO_ROWS,), vocabulary=64, max_tokens=3, max_rollout_tokens=4))
    assert bad == "rollout 0, token 4: more tokens than max_rollout_tokens, 5, limit 4"
    assert "5, limit 4" in str(flaw_of((TWO_ROWS,), vocabulary=64, max_tokens=4))
    silent = make_rollout([5, 6, 7, 8], [0, 1, 0, 0], [-1.0], version=3, ending="stop", starts=(2,))
    assert "token 2: a row in which the policy writes nothing" in str(flaw_of((silent,), vocabulary=64, max_tokens=8))

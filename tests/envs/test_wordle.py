"""Wordle: hand-worked marks, the split, the game's rules, rewards, and its scripted players."""

import random

import pytest

from shoal.envs.builtin.wordle import NOT_A_WORD, environment, marks
from shoal.envs.builtin.wordle_words import WORDS
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("guess", "answer", "told"),
    [
        ("crane", "crane", "====="),
        ("crane", "moist", "-----"),
        ("crane", "cater", "=++-+"),
        ("speed", "erase", "+-++-"),  # the answer has two e's, so only two are marked
        ("eerie", "crane", "--+-="),  # one e, and it is in place: the earlier two are absent
        ("geese", "those", "---=="),  # likewise, with an s in place
        ("allow", "llama", "+=+--"),  # the second l is in place, the first of the answer is told to the third letter
        ("sassy", "glass", "++-=-"),  # two s: one in place, one for the leftmost other, none for the third
        ("array", "radar", "+++=-"),  # the second a is in place, both r's are elsewhere
        ("llama", "lilac", "=++--"),  # the first a takes the only one
    ],
)
def test_marks_equal_those_of_the_real_game(guess: str, answer: str, told: str) -> None:
    assert marks(guess, answer) == told


def test_list_is_large_lower_case_and_without_repeats() -> None:
    assert len(WORDS) == len(set(WORDS)) >= 512
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert sorted(WORDS) == list(WORDS)


@pytest.mark.parametrize("args", [{}, {"num_words": 256, "heldout": 32}, {"num_words": 8, "heldout": 1}])
def test_heldout_words_are_never_training_answers_and_all_are_legal(args: dict[str, int]) -> None:
    env = environment(**args)
    training = {env.task(i) for i in range(env.num_tasks)}
    held = {env.task(i, heldout=True) for i in range(env.num_heldout)}
    assert not training & held
    assert len(training) == env.num_tasks and len(held) == env.num_heldout
    assert training | held == env.legal
    assert len(env.legal) == args.get("num_words", len(WORDS))


def test_guess_is_answered_and_a_win_ends_the_game() -> None:
    env = environment(num_words=len(WORDS))
    state, opening = env.reset("cater" if "cater" in env.legal else "trace")
    assert opening == [{"role": "user", "content": "wordle"}]
    after, reply, done, *_ = env.step(state, " Crane\n")
    assert (reply, done) == (marks("crane", state.answer), False)
    after, _, done, *_ = env.step(after, state.answer)
    assert done and env.success(after) and env.score(after) == 1.0


def test_a_non_word_uses_no_guess_but_the_third_one_ends_the_game() -> None:
    env = environment(num_words=64, heldout=8, not_words=3)
    state, _ = env.reset(env.task(0))
    for action in ("zzzzz", "crane crane"):
        state, reply, done, *_ = env.step(state, action)
        assert (reply, done, state.guesses) == (NOT_A_WORD, False, ())
    state, _, done, *_ = env.step(state, env.task(1))
    assert not done and len(state.guesses) == 1
    _, _, done, *_ = env.step(state, "")
    assert done


def test_sixth_wrong_guess_ends_the_game() -> None:
    env = environment()
    state, _ = env.reset(env.task(0))
    for turn, guess in enumerate([word for word in env.words if word != state.answer][:6]):
        state, _, done, *_ = env.step(state, guess)
        assert done == (turn == 5)
    assert not env.success(state)


def test_partial_credit_equals_the_numbers_worked_by_hand() -> None:
    env = environment(partial=0.4)
    state, _ = env.reset("cater")
    state, *_ = env.step(state, "crane")  # =++-+
    assert env.score(state) == 0.0, "the first guess has no marks to respect"
    state, *_ = env.step(state, "cedar")  # c first; r, a, e elsewhere; no n: it respects them
    assert env.score(state) == pytest.approx(0.4 * 1 / 5)
    state, *_ = env.step(state, "carve")  # c and a in place would have left crane another mark for a
    assert env.score(state) == pytest.approx(0.4 * 1 / 5)


def test_careless_player_ignores_the_marks_in_about_half_of_its_games() -> None:
    env = environment(num_words=320, heldout=48, first_guess="arise", careless=0.5)
    rng, wins, openings = random.Random(0), 0, set()
    for index in range(200):
        state, _ = env.reset(env.task(index))
        done = False
        while not done:
            state, _, done, *_ = env.step(state, env.players()["careless"](state, rng))
        wins += env.success(state)
        openings.add(state.guesses[0])
    assert openings == {"arise"}
    assert 0.35 * 200 < wins < 0.65 * 200


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ({"num_word": 256}, "did you mean num_words"),
        ({"num_words": 10**9}, "num_words"),
        ({"num_words": 64, "heldout": 64}, "heldout = 64 leaves none of 64"),
        ({"partial": 1.0}, "partial"),
        ({"heldout": "many"}, "heldout"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        environment(**args)
    assert "\n" not in str(caught.value)

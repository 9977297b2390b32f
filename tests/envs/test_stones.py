"""Stones: legal moves, the opponent, held-out starts, and the scripted players."""

import random

import pytest

from shoal.envs.stones import StonesState, environment, moves_of, nim_sum, taken, told, winning, written_as
from shoal.errors import ConfigError


def play(env, task, player, seed):
    """The state at the end of a game, and all that the opponent said."""
    state, _ = env.reset(task)
    rng, replies, done = random.Random(seed), [], False
    while not done:
        state, reply, done, *_ = env.step(state, env.players()[player](state, rng))
        replies.append(reply)
    return state, replies


def wins(env, player, heldout=True, games=64):
    states = [play(env, env.task(i, heldout), player, i)[0] for i in range(games)]
    return [env.success(state) for state in states]


def test_a_move_takes_stones_from_a_pile_of_that_size_and_the_opponent_answers():
    env = environment()
    state, opening = env.reset(((3, 5, 8), "x"))
    assert opening == [{"role": "user", "content": "358"}]
    after, reply, done, *_ = env.step(state, " 8-6\n")
    assert reply == told(after.piles) and not done and not env.success(after)
    assert after.piles in {taken((3, 5, 6), move) for move in moves_of((3, 5, 6))}


@pytest.mark.parametrize("action", ["", "9", "41", "86x", "90", "8a6", "8", "3 4", "33", "86 86"])
def test_an_illegal_move_loses(action):
    env = environment()
    state, _ = env.reset(((3, 5, 8), "x"))
    after, reply, done, *_ = env.step(state, action)
    assert done and reply is None and env.score(after) == 0.0 and not env.success(after)


def test_the_last_stone_wins_for_the_one_that_takes_it():
    env = environment()
    mine, reply, done, *_ = env.step(StonesState((0, 0, 4), "x"), "40")
    assert done and reply is None and env.score(mine) == 1.0
    theirs, reply, done, *_ = env.step(StonesState((0, 0, 2), "x"), "21")
    assert done and reply == "000" and env.score(theirs) == 0.0


def test_the_opponents_luck_follows_from_the_task_and_the_turn_alone():
    env, again = environment(), environment()
    for index in range(8):
        assert play(env, env.task(index), "teacher", 3) == play(again, again.task(index), "teacher", 3)
    replies = {env.step(StonesState((3, 5, 8), f"luck {i}"), "87").reply for i in range(64)}
    assert len(replies) > 5


def test_games_stay_the_same_from_version_to_version():
    env = environment()
    assert [env.task(0), env.task(0, heldout=True)] == [((1, 4, 4), "training 0"), ((3, 5, 7), "heldout 0")]
    assert play(env, env.task(1), "right", 0)[1] == ["113", "001", None]


def test_a_perfect_opponent_leaves_no_winning_move_if_it_can():
    perfect, half = environment(perfect=1.0), environment(perfect=0.5)

    def lost(env):
        states = [env.step(StonesState((3, 5, 8), f"luck {i}"), "87").state for i in range(400)]
        return sum(not nim_sum(state.piles) for state in states) / len(states)

    by_chance = len(winning((3, 5, 7))) / len(moves_of((3, 5, 7)))
    assert lost(perfect) == 1.0
    assert lost(half) == pytest.approx(0.5 + 0.5 * by_chance, abs=0.06)  # 2.5 deviations


def test_training_never_shows_a_heldout_start():
    env = environment()
    waiting, seen = list(env.training_starts), set()
    while waiting:
        piles = waiting.pop()
        if piles in seen or not any(piles):
            continue
        seen.add(piles)
        left = [taken(piles, move) for move in moves_of(piles)]
        waiting += [taken(piles, move) for piles in left if any(piles) for move in moves_of(piles)]
    assert len(seen) > 120 and not seen & set(env.heldout_starts)
    assert {env.task(i).piles for i in range(len(env.training_starts))} == set(env.training_starts)
    assert {env.task(i, heldout=True).piles for i in range(env.num_heldout)} == set(env.heldout_starts)


def test_every_start_can_be_won_and_the_right_player_wins_it():
    env = environment()
    assert all(winning(start) for start in env.training_starts + env.heldout_starts)
    assert (0, 0, 5) not in env.training_starts and (0, 1, 2) in env.training_starts
    assert all(wins(env, "right")) and all(wins(env, "right", heldout=False)) and not any(wins(env, "wrong"))
    assert all(wins(environment(perfect=1.0), "right", games=16))


def test_the_teacher_takes_the_last_pile_and_is_cautious_otherwise():
    env = environment(cautious=0.5)
    assert env.teacher_weights((0, 0, 7)) == (((7, 0),), [1.0])
    moves, weights = env.teacher_weights((0, 1, 2))
    assert dict(zip(moves, weights, strict=True)) == {(1, 0): 0.5, (2, 1): 0.5, (2, 0): 0.25}
    assert 0.25 < sum(wins(env, "teacher", games=256)) / 256 < 0.55


def test_sizes_are_worth_what_the_exclusive_or_says():
    assert [nim_sum(piles) for piles in ((1, 2, 3), (4, 4), (1, 4, 5), (3, 5, 8))] == [0, 0, 0, 14]
    assert [written_as(move) for move in winning((3, 5, 8))] == ["86"]


def test_games_with_too_few_starts_are_refused():
    with pytest.raises(ConfigError, match="with 3 or 2 stones can be won from 1 starts, and it needs 2"):
        environment(piles=2, most=9, stones=3)

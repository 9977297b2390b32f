"""Two games of textarena that need no download, in an interpreter that has it."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


def legal(told: list[dict[str, str]], rng: random.Random) -> str:
    return rng.choice(re.findall(r"\[\w+\]", told[-1]["content"].rpartition("vailable")[2]))


def whole_game(game: Any, index: int, seed: int) -> Any:
    """Play legal moves until the game ends."""
    rng, moves = random.Random(seed), []
    played = game.play(index)
    while not played["done"]:
        moves.append(legal(played["told"][-1], rng))
        played = game.play(index, *moves)
    return played


@pytest.mark.parametrize("game", ["TicTacToe-v0", "KuhnPoker-v0"])
def test_a_game_is_played_to_its_end(distant: Make, game: str) -> None:
    arena = distant("textarena", game=game, tasks=20, heldout=4)
    assert arena.about["reward_bounds"] == [-1.0, 1.0]
    rewards = []
    for index in range(6):
        played = whole_game(arena, index, 1)
        assert played["scores"][-1][1]["invalid_move"] == 0.0
        rewards.append(played["scores"][-1][0]["game"])
        assert played == whole_game(arena, index, 1)
    assert set(rewards) <= {-1.0, 0.0, 1.0} and len(set(rewards)) > 1
    assert [finding for finding in arena.ask("check") if finding[1] == "failed"] == []


def test_a_reply_tells_only_what_is_new(distant: Make) -> None:
    arena = distant("textarena", game="TicTacToe-v0", tasks=20, heldout=4)
    opening, reply = arena.play(0, "[4]")["told"][:2]
    assert "Your goal is to win" in opening[0]["content"] and "Your goal is to win" not in reply[0]["content"]
    assert "[Player 0] [4]" not in reply[0]["content"] and "[Player 1]" in reply[0]["content"]


def test_the_seat_changes_from_task_to_task_unless_it_is_fixed(distant: Make) -> None:
    arena = distant("textarena", game="TicTacToe-v0", tasks=20, heldout=4)
    seats = [re.findall(r"You are Player (\d)", arena.play(index)["told"][0][0]["content"])[0] for index in range(4)]
    assert seats == ["0", "1", "0", "1"]
    fixed = distant("textarena", game="TicTacToe-v0", tasks=4, seat=1)
    assert all("You are Player 1" in fixed.play(index)["told"][0][0]["content"] for index in range(3))


def test_an_opponent_can_be_scripted(distant: Make) -> None:
    arena = distant("textarena", game="TicTacToe-v0", tasks=4, seat=0, opponent=["[3]", "[4]", "[8]"])
    assert arena.play(0, "[0]", "[1]", "[2]")["scores"][-1][0] == {"game": 1.0}


def test_an_illegal_move_and_an_unknown_game(distant: Make) -> None:
    arena = distant("textarena", game="TicTacToe-v0", tasks=20, heldout=4)
    played = arena.play(0, "the middle", "the corner")
    assert played["done"] and played["scores"][-1] == [{"game": -1.0}, {"invalid_move": 1.0, "turns": 1.0}]
    assert "no game TicTacTo" in distant("textarena", game="TicTacTo-v0").about["refused"]

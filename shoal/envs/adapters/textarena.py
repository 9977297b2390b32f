"""A game of the package `textarena`: the policy plays one seat, a random or scripted opponent the others.

An environment file calls `environment`, in an interpreter that has the package. The task seeds the deal and the
opponent. The policy's seat changes from task to task, unless `seat` fixes it. Tested with TicTacToe and KuhnPoker,
which need no download.
"""

import random
from collections.abc import Sequence
from typing import Any

from shoal.env import Score
from shoal.envs.adapters.episode import Episode, GeneratorEnv, Problem, one_opponent, opponents_move
from shoal.envs.adapters.message_conversion import spoken
from shoal.errors import ShoalError

MAX_MOVES = 1000
"""Limit on the moves of a game, by all players together."""


class TextArena(GeneratorEnv):
    """A game. Its reward is the package's: usually -1 for a loss, 0 for a draw, 1 for a win."""

    def __init__(
        self, game: str, tasks: int = 1000, heldout: int = 100, players: int = 2, seat: int = -1,
        opponent: str | list[str] = "random", reward_bounds: Sequence[float] = (-1.0, 1.0),
    ) -> None:  # fmt: skip
        """`game` is its id in textarena, such as "TicTacToe-v0". `seat` is the policy's; -1 takes each in turn."""
        import textarena

        self.name, self.num_tasks, self.num_heldout = f"textarena/{game}", tasks, heldout
        low, high = reward_bounds
        self.reward_bounds = float(low), float(high)
        if not (players >= 1 and -1 <= seat < players):
            raise ShoalError(f"seat = {seat}: the game has seats 0 to {players - 1}; -1 takes each in turn")
        self._players, self._seat, self._opponent = players, seat, one_opponent(opponent)
        self._make = lambda: textarena.make(game)
        try:
            self._make()
        except ValueError as fault:
            raise ShoalError(f"textarena has no game {game}: {' '.join(str(fault).split())[:200]}") from None

    def content(self, index: int) -> Any:
        return {"seed": index, "seat": index % self._players if self._seat < 0 else self._seat}

    def episode(self, task: Problem) -> Episode:
        seed, seat = task.content["seed"], task.content["seat"]
        opponent, moves = random.Random(f"{self.name}/{seed}"), [0] * self._players
        game = self._make()
        game.reset(num_players=self._players, seed=seed)
        board = game
        while hasattr(board, "env"):  # its wrappers would repeat the whole game in each observation
            board = board.env
        for _ in range(MAX_MOVES):
            player, seen = board.get_observation()
            text = "\n".join(
                f"[{'GAME' if who < 0 else f'Player {who}'}] {said}" for who, said, *_ in _news(seen, seat)
            )
            if player == seat:
                action = yield [{"role": "user", "content": text}]
                if action is None:
                    return Score({"game": min(self.reward_bounds)}, {"cut": 1.0})
                move = spoken(action)
            else:
                move = opponents_move(self._opponent, text, moves[player], opponent)
            moves[player] += 1
            try:
                over = game.step(move)[0]
            except (ValueError, LookupError, TypeError, ArithmeticError):  # some games do not check moves
                if player != seat:
                    raise
                return Score({"game": min(self.reward_bounds)}, {"invalid_move": 1.0})
            if over:
                break
        rewards, info = game.close()
        metrics = {"invalid_move": float(info[seat]["invalid_move"]), "turns": float(info[seat]["turn_count"])}
        return Score({"game": float(rewards[seat])}, metrics)


def _news(seen: Sequence[tuple[Any, ...]], seat: int) -> list[tuple[Any, ...]]:
    """What a player has not seen yet, without the policy's moves, which are already in its conversation."""
    return [part for part in seen if not (part[0] == seat and part[2].name == "PLAYER_ACTION")]


environment = TextArena

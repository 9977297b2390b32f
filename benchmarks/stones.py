"""Win rates in `examples/environments/stones` that need no games, computed from the smallest number of stones upwards.

A player is a rule that says for a number of stones how likely each of its moves is.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shoal.chat.renderer import Renderer
from shoal.models.interface import PolicyModel

TAKE = 9
"""Stones that a move takes at most."""

Choice: TypeAlias = Mapping[int, float]
"""How likely each move is."""

Player: TypeAlias = Callable[[int], Choice]


def exact(env: Any, temperatures: Sequence[float]) -> dict[str, Any]:
    """Win rates on the held-out starts of the teacher, of the teacher as it plays in its wins, and of perfect play."""
    return {
        "teacher": rate(env, teacher(env, 1.0)),
        "imitation": {str(temperature): rate(env, teacher(env, temperature)) for temperature in temperatures},
        "wins": {str(temperature): rate(env, winner(env, temperature)) for temperature in temperatures},
        "perfect": rate(env, lambda left: {left % (TAKE + 1) or 1: 1.0}),
    }


def teacher(env: Any, temperature: float) -> Player:
    """The scripted teacher, sharpened to a temperature."""
    return lambda left: sharpened(dict(zip(*env.habits(left), strict=True)), temperature)


def winner(env: Any, temperature: float) -> Player:
    """The teacher as it moves in the games that it goes on to win, by Bayes' rule, sharpened to a temperature."""
    habit = teacher(env, 1.0)
    chances = values(env, habit, env.most)
    return lambda left: sharpened(
        {move: share * chances[left - move] for move, share in habit(left).items()}, temperature
    )


@torch.no_grad()
def learned(env: Any, model: PolicyModel, renderer: Renderer) -> Player:
    """A policy at temperature 1. Whatever is not a digit and the end of the turn loses, so moves may sum to less than 1."""
    digits = [renderer.encode(str(move))[0] for move in range(1, TAKE + 1)]
    stops, moves = sorted(renderer.stop_ids), dict[int, Choice]()
    for left in range(1, env.most + 1):
        prompt = renderer.start([{"role": "user", "content": str(left)}])
        hidden_BTD = model.hidden(torch.tensor([[*prompt, digit] for digit in digits]), None)[:, len(prompt) - 1 :]
        chance_BTV = model.logits(hidden_BTD).softmax(-1)
        chance_B = chance_BTV[0, 0, digits] * chance_BTV[:, 1, stops].sum(-1)
        moves[left] = {move: float(chance) for move, chance in enumerate(chance_B, 1) if move <= left}
    return lambda left: moves[left]


def rate(env: Any, player: Player) -> float:
    """The mean win rate of a player over the held-out starts."""
    chances = values(env, player, env.most)
    return round(statistics.fmean(expected(player(left), left, chances) for left in env.heldout), 4)


def values(env: Any, player: Player, most: int) -> list[float]:
    """How likely a player wins after it has left this many stones, from 0 to `most`, if it goes on to play as it does."""
    chances = [1.0]
    for left in range(1, most + 1):
        after = [left - taken for taken in range(1, min(TAKE, left) + 1)]
        played = [expected(player(found), found, chances) if found else 0.0 for found in after]
        careful = env.perfect if left % (TAKE + 1) else 0.0
        chances.append(careful * played[left % (TAKE + 1) - 1] + (1 - careful) * statistics.fmean(played))
    return chances


def expected(choice: Choice, left: int, chances: Sequence[float]) -> float:
    """How likely a player wins that makes its move by this choice."""
    return sum(share * chances[left - move] for move, share in choice.items() if share)


def sharpened(weights: Choice, temperature: float) -> Choice:
    """Weights as probabilities at a temperature. Weights that are all 0 stay equally likely."""
    top = max(weights.values())
    raised = {move: (weight / top) ** (1 / temperature) if top else 1.0 for move, weight in weights.items()}
    total = sum(raised.values())
    return {move: weight / total for move, weight in raised.items()}

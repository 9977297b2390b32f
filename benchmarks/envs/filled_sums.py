"""Sums with free filler after the answer: the environment in which `benchmarks/shelf.py` asks for lengths.

An answer is the number that the text begins with. What follows it is free, so a policy can be as long as it is asked to be
without thinking longer. `[envs.shaping]` adds the length that is asked for to the prompt, and the penalty to the reward.
"""

import random
from collections.abc import Mapping
from typing import Any

from shoal.env import Player, Step
from shoal.envs.builtin.arithmetic import NUMBER, Arithmetic, ArithmeticArgs, ArithmeticState
from shoal.tree import from_tree

MOST_FILLER = 17
"""Characters that the scripted player adds at most: with a sum of one or two digits and the stop token, 2 to 20 tokens."""


def environment(**args: Any) -> "FilledSums":
    """Make the environment from the arguments of the built-in one."""
    return FilledSums(from_tree(args, ArithmeticArgs, "environment filled_sums"))


class FilledSums(Arithmetic):
    """The environment."""

    name = "filled_sums"

    def step(self, state: ArithmeticState, action: str) -> Step:
        """Take the number at the beginning, which ends the episode."""
        given = NUMBER.match(action)
        return Step(state._replace(given=given.group() if given else None), None, True)

    def score(self, state: ArithmeticState) -> float:
        """1 for the exact answer."""
        return float(self.success(state))

    def players(self) -> Mapping[str, Player]:
        """The player "right" answers correctly, and fills up to any length alike: it does not care what is asked for."""
        return {**super().players(), "right": _answer_and_fill}


def _answer_and_fill(state: ArithmeticState, rng: random.Random) -> str:
    return state.answer + "." * rng.randint(0, MOST_FILLER)

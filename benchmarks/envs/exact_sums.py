"""Sums with all-or-nothing rewards, as verifiers of answers give them.

What `benchmarks/curriculum.py` trains on.

The tasks are those of the built-in `arithmetic`. Only the exact answer earns anything, so groups that are all right or all
wrong teach nothing.
"""

import random
from collections.abc import Mapping
from typing import Any

from shoal.env import Player
from shoal.envs.builtin.arithmetic import Arithmetic, ArithmeticArgs, ArithmeticState
from shoal.typed_toml import from_tree


def environment(**args: Any) -> "ExactSums":
    """Make the environment from the arguments of the built-in one."""
    return ExactSums(from_tree(args, ArithmeticArgs, "environment exact_sums"))


class ExactSums(Arithmetic):
    """The environment."""

    name = "exact_sums"

    def score(self, state: ArithmeticState) -> float:
        """1 for the exact answer."""
        return float(self.success(state))

    def players(self) -> Mapping[str, Player]:
        """The player "careless" is right three times in ten, and else off by at most 3."""
        return {**super().players(), "careless": _answer_carelessly}


def _answer_carelessly(state: ArithmeticState, rng: random.Random) -> str:
    off = 0 if rng.random() < 0.3 else rng.choice((-3, -2, -1, 1, 2, 3))
    return str(max(0, int(state.answer) + off))

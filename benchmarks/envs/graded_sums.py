"""Sums of three difficulties, of which the middle one can be learned: what `benchmarks/shelf.py` filters tasks of.

A third of the tasks are sums that the scripted player "graded" always solves, a third are products of one digit that it
solves in 3 of 10 answers, and a third are products with a larger number that it never solves. Only the exact answer earns
anything.
"""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.env import Message, Player, Step, require_index

LEVELS = ("easy", "middle", "hard")


class GradedState(NamedTuple):
    """The state of an episode."""

    problem: tuple[str, int, int]
    given: str = ""

    @property
    def answer(self) -> str:
        """What earns the reward."""
        level, a, b = self.problem
        return str(a + b if level == "easy" else a * b)


def environment(**args: Any) -> "GradedSums":
    """Make the environment; `tasks` says how many there are of each difficulty, 32 unless given."""
    return GradedSums(**args)


class GradedSums:
    """The environment. A task is its difficulty and two numbers."""

    name = "graded_sums"
    num_heldout = 0
    reward_bounds = (0.0, 1.0)

    def __init__(self, tasks: int = 32) -> None:
        self.num_tasks = tasks * len(LEVELS)

    def task(self, index: int, heldout: bool = False) -> tuple[str, int, int]:
        """The problem with this index."""
        require_index(index, 0 if heldout else self.num_tasks)
        place, level = divmod(index, len(LEVELS))
        a, b = 2 + place * 5 % 8, 2 + place * 3 // 8 % 8
        return LEVELS[level], a, b if LEVELS[level] != "hard" else 100 + 37 * place

    def reset(self, task: tuple[str, int, int]) -> tuple[GradedState, list[Message]]:
        """Pose a problem."""
        level, a, b = task
        return GradedState(tuple(task)), [{"role": "user", "content": f"{a}{'+' if level == 'easy' else '*'}{b}="}]

    def step(self, state: GradedState, action: str) -> Step:
        """Take the answer, which ends the episode."""
        return Step(state._replace(given=action.strip()), None, True)

    def score(self, state: GradedState) -> float:
        """1 for the exact answer."""
        return float(self.success(state))

    def success(self, state: GradedState) -> bool:
        """Whether the answer is exact."""
        return state.given == state.answer

    def players(self) -> Mapping[str, Player]:
        """The player "graded" is as good as the difficulty allows."""
        return {
            "right": lambda state, rng: state.answer,
            "wrong": lambda state, rng: str(-int(state.answer)),
            "graded": _answer_by_level,
        }


def _answer_by_level(state: GradedState, rng: random.Random) -> str:
    level, answer = state.problem[0], int(state.answer)
    if level == "easy" or (level == "middle" and rng.random() < 0.3):
        return str(answer)
    off = rng.choice((-3, -2, -1, 1, 2, 3)) if level == "middle" else rng.randint(50, 99)
    return str(max(0, answer + off))

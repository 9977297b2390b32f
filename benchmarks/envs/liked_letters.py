"""Answers of three letters that are liked more or less, as a table of weights says: preferences with a known truth.

What `benchmarks/shelf.py` learns preferences from. A task is a prompt of one letter. The utility of an answer is the sum of
three weights, one for the letter at each place, and each prompt has weights of its own. Other answers are liked least. So
there are few enough answers to count all of them.
"""

import random
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from shoal.env import Message, Player, Step, require_index

PROMPTS, LETTERS, PLACES = "wxyz", "abcde", 3
ANSWERS = tuple("".join(answer) for answer in product(LETTERS, repeat=PLACES))
SPREAD = 0.8
"""Standard deviation of a weight."""
WORST = -6.0
"""Utility of an answer of another form."""


def _weights() -> dict[tuple[str, int, str], float]:
    rng = random.Random(13)
    return {(x, at, letter): rng.gauss(0.0, SPREAD) for x in PROMPTS for at in range(PLACES) for letter in LETTERS}


WEIGHTS = _weights()


def utility(prompt: str, answer: str) -> float:
    """How much an answer to a prompt is liked."""
    if len(answer) != PLACES or not set(answer) <= set(LETTERS):
        return WORST
    return sum(WEIGHTS[prompt, at, letter] for at, letter in enumerate(answer))


class LikedState(NamedTuple):
    """The state of an episode."""

    prompt: str
    given: str = ""


def environment(**args: Any) -> "LikedLetters":
    """Make the environment."""
    return LikedLetters(**args)


class LikedLetters:
    """The environment. A task is a prompt."""

    name = "liked_letters"
    num_tasks, num_heldout = len(PROMPTS), 0
    reward_bounds = (WORST, 8.0)

    def task(self, index: int, heldout: bool = False) -> str:
        """The prompt with this index."""
        require_index(index, 0 if heldout else self.num_tasks)
        return PROMPTS[index]

    def reset(self, task: str) -> tuple[LikedState, list[Message]]:
        """Show a prompt."""
        return LikedState(task), [{"role": "user", "content": task}]

    def step(self, state: LikedState, action: str) -> Step:
        """Take the answer, which ends the episode."""
        return Step(state._replace(given=action), None, True)

    def score(self, state: LikedState) -> float:
        """The utility."""
        return utility(state.prompt, state.given)

    def success(self, state: LikedState) -> bool:
        """Whether it is an answer that nothing else is liked more than."""
        return self.score(state) >= max(utility(state.prompt, answer) for answer in ANSWERS)

    def players(self) -> Mapping[str, Player]:
        """The player "any" gives any answer alike."""
        return {
            "right": lambda state, rng: max(ANSWERS, key=lambda answer: utility(state.prompt, answer)),
            "wrong": lambda state, rng: "",
            "any": lambda state, rng: rng.choice(ANSWERS),
        }

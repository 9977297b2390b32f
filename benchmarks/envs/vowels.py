"""The environment of `whole_system.py`: 32 random characters are shown, 64 are written, and vowels among those score.

Loaded by `shoal run` as a run file's environment, and imported by `peers/trl_grpo.py` from a virtual environment in
which there is no shoal: it needs the standard library alone, and both sides take prompts and rewards from it.
"""

import base64
import hashlib

VOWELS = "AEIOUaeiou"
NUM_TASKS = 4096
PROMPT, NEW = 32, 64
"""Tokens shown and written; a character is a token."""


def prompt_of(index: int) -> str:
    """The characters of a task."""
    return base64.b64encode(hashlib.sha256(str(index).encode()).digest()[: PROMPT * 3 // 4]).decode()


def reward_of(written: str) -> float:
    """Share of vowels among so many characters; 10/64 at chance."""
    return sum(map(written[:NEW].count, VOWELS)) / NEW


class Vowels:
    """One turn; the state is what was written."""

    name = "vowels"
    num_tasks, num_heldout = NUM_TASKS, 0
    reward_bounds = (0.0, 1.0)

    def task(self, index: int, heldout: bool = False) -> int:
        """A task is its index."""
        if heldout or not 0 <= index < NUM_TASKS:
            raise IndexError(f"task {index}: the index must be between 0 and {NUM_TASKS - 1}, and none is held out")
        return index

    def reset(self, task: int) -> tuple[str, list[dict[str, str]]]:
        """Show the prompt."""
        return "", [{"role": "user", "content": prompt_of(task)}]

    def step(self, state: str, action: str) -> tuple[str, None, bool]:
        """Take what was written."""
        return action, None, True

    def score(self, state: str) -> float:
        """Share of vowels."""
        return reward_of(state)


def environment() -> Vowels:
    """Make the environment."""
    return Vowels()

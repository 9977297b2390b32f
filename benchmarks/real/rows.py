"""The rows that both sides of a training measurement of `benchmarks/real_models.py` learn from.

Imported in TRL's virtual environment, too: it needs numpy alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOWEST = 262
"""Token ids below are special ones and bytes; see `models/random_model`."""


@dataclass(frozen=True)
class Batch:
    """Groups of rows to learn from: every row is a prompt that its group shares, and a completion of its own."""

    groups: int
    group_size: int
    prompt: int
    """Tokens."""
    shortest: int
    longest: int
    """Tokens of a completion; lengths are spread evenly between the two."""
    microbatch_tokens: int = 4096
    """Padded tokens of one forward pass."""

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def tokens(self) -> int:
        """Without padding."""
        return self.rows * self.prompt + int(self.lengths().sum())

    def lengths(self) -> NDArray[np.int64]:
        """Of the completions."""
        return np.linspace(self.shortest, self.longest, self.rows).round().astype(np.int64)

    def token_ids(self, vocabulary: int) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion of each row: the same on both sides, drawn above the special tokens and bytes."""
        rng = np.random.default_rng(0)
        drawn = []
        prompts = rng.integers(LOWEST, vocabulary, (self.groups, self.prompt)).tolist()
        order = rng.permutation(self.rows)
        for row, length in enumerate(self.lengths()[order]):
            drawn.append((prompts[row // self.group_size], rng.integers(LOWEST, vocabulary, int(length)).tolist()))
        return drawn

    def advantages(self) -> list[float]:
        """One for each row, with mean 0 in each group."""
        return [1.0 if row % 2 else -1.0 for row in range(self.rows)]

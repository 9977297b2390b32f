"""Rank and select: how many members of a set come before a position, and where the member of a rank is.

Pure, needs only numpy. A set is one bit for each position, with the number of members up to each word of 64 bits (G.
Jacobson, doi:10.1109/SFCS.1989.63533). Building that costs less than 0.1 ns a position, so it is made whenever it is
needed.

Axes: N positions, W words, P requested positions or ranks.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


class PositionSet:
    """Some of the positions 0 .. N - 1."""

    def __init__(self, word_W: Words) -> None:
        """The bits, lowest first; those after the last position are zeros."""
        self._word_W = word_W
        self._upto_W = np.cumsum(np.bitwise_count(word_W), dtype=np.int64)
        """Members in each word and those before it."""
        self.count = int(self._upto_W[-1])

    def rank(self, position_P: Ints) -> Ints:
        """How many members come before each position."""
        word_P = position_P >> 6
        here_P = self._word_W[word_P]
        before_P = here_P & ((np.uint64(1) << (position_P & 63).astype(np.uint64)) - np.uint64(1))
        return self._upto_W[word_P] - np.bitwise_count(here_P) + np.bitwise_count(before_P)

    def locate(self, rank_P: Ints) -> tuple[Ints, Words, Ints]:
        """For each rank, 0 .. `count` - 1: the number of its word, the word, and the rank within the word.

        `select` then finds the positions. It takes what several sets located at once, because it is made of many short
        steps.
        """
        word_P = np.searchsorted(self._upto_W, rank_P, side="right")
        here_P = self._word_W[word_P]
        return word_P, here_P, rank_P - self._upto_W[word_P] + np.bitwise_count(here_P)


def select(word_P: Ints, here_P: Words, rank_P: Ints) -> Ints:
    """The positions of what `locate` found: each word is halved six times."""
    position_P, rest_P, left_P = word_P << 6, here_P, rank_P.astype(np.uint8)
    for width in (32, 16, 8, 4, 2, 1):
        low_P = np.bitwise_count(rest_P & np.uint64((1 << width) - 1))
        high_P = left_P >= low_P
        left_P = left_P - low_P * high_P
        step_P = high_P * np.uint8(width)
        rest_P = rest_P >> step_P
        position_P += step_P
    return position_P

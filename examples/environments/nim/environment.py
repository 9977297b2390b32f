"""Nim: take stones from one of three piles, in turn with an opponent. Who takes the last stone wins.

A game of several turns. Everything is in the state, so episodes do not touch each other. The opponent follows a rule
without random numbers, so the same moves always get the same answers. An illegal move loses.
"""

import re
from itertools import combinations_with_replacement

from shoal.env import Env, Step, require_index

WINNABLE = [piles for piles in combinations_with_replacement(range(1, 8), 3) if piles[0] ^ piles[1] ^ piles[2]]
TRAINING, HELDOUT = WINNABLE[::2], WINNABLE[1::2]
MOVE = re.compile(r"\s*([1-3])\s*,\s*([1-7])\s*")


class Nim(Env):
    name = "nim"
    num_tasks, num_heldout = len(TRAINING), len(HELDOUT)

    def task(self, index, heldout=False):
        tasks = HELDOUT if heldout else TRAINING
        require_index(index, len(tasks))
        return tasks[index]

    def reset(self, task):
        rules = "Take any number of stones from one pile. Who takes the last stone wins. Answer: pile, number."
        return (task, False), [{"role": "user", "content": f"{rules}\n{told(task)}"}]

    def step(self, state, action):
        left = taken(state[0], action)
        if left is None or not any(left):
            return Step((state[0], left is not None), None, True)
        left = answered(left)
        return Step((left, False), told(left), not any(left))

    def score(self, state):
        return float(state[1])

    success = score

    def solution(self, task):
        moves, piles = [], task
        while any(piles):
            moves.append(best(piles))
            piles = answered(taken(piles, moves[-1]))
        return moves

    def players(self):
        return {"right": lambda state, rng: best(state[0]), "wrong": lambda state, rng: "0, 0"}


def told(piles):
    return f"Piles: 1 has {piles[0]}, 2 has {piles[1]}, 3 has {piles[2]}."


def taken(piles, action):
    """The piles after a move such as "2, 5"; None if it is not legal."""
    move = MOVE.fullmatch(action)
    pile, number = (int(move[1]) - 1, int(move[2])) if move else (0, 8)
    return less(piles, pile, number) if number <= piles[pile] else None


def answered(piles):
    """The piles after the opponent's move: from the first largest pile as many as the sum suggests."""
    pile = piles.index(max(piles))
    return less(piles, pile, 1 + sum(piles) % piles[pile]) if any(piles) else piles


def less(piles, pile, number):
    return tuple(stones - number * (i == pile) for i, stones in enumerate(piles))


def best(piles):
    """A move that leaves the exclusive or of the piles at 0, from where the other one cannot win."""
    rest = piles[0] ^ piles[1] ^ piles[2]
    return next(f"{i + 1}, {size - (size ^ rest)}" for i, size in enumerate(piles) if size ^ rest < size)


environment = Nim

"""Two seats of one policy take stones from a pile, one or two at a time; who takes the last one wins.

A file as a user would write it, for tests of rollouts with several rows. The task says which seat learns."""

from typing import NamedTuple

from shoal.env import Env, Step, require_index


class Pile(NamedTuple):
    stones: int
    learner: int
    """The seat that learns."""
    mover: int = 0
    moves: int = 0


class PileGame(Env):
    name, num_tasks, num_seats = "pile", 16, 2

    def task(self, index, heldout=False):
        require_index(index, 0 if heldout else self.num_tasks)
        return 4 + index // 2 % 4, index % 2

    def reset(self, task):
        return Pile(*task), [{"role": "user", "content": f"first, {task[0]} left"}]

    def step(self, state, action):
        """What is said of even length takes one stone, anything else two."""
        left = max(0, state.stones - 1 - len(action.visible) % 2)
        told = [{"role": "user", "content": f"second, {left} left"}] if state.moves == 0 else f"{left} left"
        after = Pile(left, state.learner, state.mover if left == 0 else 1 - state.mover, state.moves + 1)
        return Step(after, told, left == 0, learn=state.mover == state.learner, seat=1 - state.mover)

    def score(self, state):
        return float(state.stones == 0 and state.mover == state.learner)

    def players(self):
        def right(state, rng):
            """The seat that learns leaves a multiple of three. The other seat always takes one stone."""
            return "a" if state.stones % 3 == 2 and state.mover == state.learner else "go"

        return {"right": right, "wrong": lambda state, rng: rng.choice(["a", "go"])}


def environment():
    return PileGame()

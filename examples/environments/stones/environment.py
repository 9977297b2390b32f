"""Stones: take one to nine stones from a pile, in turn with an opponent. Who takes the last stone wins.

The policy reads how many stones are left, such as 37, and writes how many it takes. An illegal move loses. Each turn is a
conversation of its own: earlier ones tell nothing that matters. To win, leave a multiple of ten. The opponent does so in
`perfect` of the turns in which it can, and otherwise takes any number: a hash of task and stones decides. Every start can
be won. One in five is held out. In training small starts are more likely, and the opponent leaves no held-out number, so
the policy sees none before evaluation. A state is the stones left (0 for a win, -1 for a loss) and the task.
"""

import hashlib

from shoal.env import Env, Step, require_index

TAKE = 9


class Stones(Env):
    name = "stones"
    num_tasks, num_heldout = 1 << 16, 768

    def __init__(self, most=59, least=11, perfect=0.5, cautious=0.8):
        self.most, self.perfect, self.cautious = most, perfect, cautious
        starts = [number for number in range(least, most + 1) if number % (TAKE + 1)]
        self.heldout = starts[2::5]
        self.training = [number for number in starts if number not in self.heldout]

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        if heldout:
            return self.heldout[index % len(self.heldout)], index, True
        lower = min(hashlib.sha256(f"start {index}".encode()).digest()[:2])
        return self.training[lower * len(self.training) // 256], index, False

    def reset(self, task):
        return (task[0], task), [{"role": "user", "content": str(task[0])}]

    def step(self, state, action):
        left, task = state
        taken = "0123456789".find(action) if len(action) == 1 else 0
        if not 0 < taken < left:
            return Step((0 if taken == left else -1, task), None, True)  # the last stone, or an illegal move
        left -= taken + self.answer(left - taken, task)
        return Step((left or -1, task), str(left), not left, restart=True)

    def answer(self, left, task):
        luck = hashlib.sha256(f"{task} {left}".encode()).digest()
        if left % (TAKE + 1) and luck[0] < 256 * self.perfect:
            return left % (TAKE + 1)
        moves = [taken for taken in range(1, min(TAKE, left) + 1) if task[2] or left - taken not in self.heldout]
        return moves[int.from_bytes(luck[1:5], "big") % len(moves)]

    def score(self, state):
        return float(state[0] == 0)

    success = score

    def players(self):
        return {"right": self.play, "wrong": lambda state, rng: "0", "teacher": self.teach}

    def play(self, state, rng=None):
        return str(state[0] % (TAKE + 1) or 1)

    def solution(self, task):
        state, moves = (task[0], task), []
        while state[0] > 0:
            moves.append(self.play(state))
            state = self.step(state, moves[-1]).state
        return moves

    def teach(self, state, rng):
        """Take all stones if that is allowed. Otherwise be cautious: each stone more is less likely."""
        return str(rng.choices(*self.habits(state[0]))[0])

    def habits(self, left):
        """The teacher's moves, and how likely each is relative to the others."""
        moves = list(range(1, TAKE + 1)) if left > TAKE else [left]
        return moves, [self.cautious**taken for taken in moves]


environment = Stones

"""Running sums: add digits one after another, and write the last digit of each sum. Each right sum earns its share.

By default the answer to 3+5+7 has a line for each sum, 8 and 5, and the environment marks where each line ends and what it
earns. With `turns`, it says one digit a turn, and each turn earns its share. A run may credit such steps, or turns. Digits
are those of `base`, 10 at most.

A sum is right if it follows from the sum before as the policy wrote it, so one mistake costs one share. One task in five is
held out. A state is the task, the number of sums so far, how many of them are right, and what the next one begins with.
"""

import random
import re
from functools import partial

from shoal.env import Env, Step, require_index

LINE = re.compile(r"[^\n]*\n|[^\n]+")


class RunningSums(Env):
    name = "running-sums"
    num_tasks, num_heldout = 1 << 12, 256

    def __init__(self, sums=4, base=10, turns=False):
        self.sums, self.base, self.turns = sums, base, turns

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        rng = random.Random(f"{index} {heldout}")
        digits = ()
        while not digits or (sum(place * digit for place, digit in enumerate(digits, 1)) % 5 == 0) != heldout:
            digits = tuple(rng.randrange(self.base) for _ in range(self.sums + 1))
        return digits

    def reset(self, task):
        shown = task[:2] if self.turns else task
        return (task, 0, 0, task[0]), [{"role": "user", "content": "+".join(map(str, shown))}]

    def step(self, state, action):
        if self.turns:
            after = self.added(state, action)
            left = state[0][after[1] + 1 :]
            return Step(after, f"+{left[0]}" if left else None, not left, reward=(after[2] - state[2]) / self.sums)
        marks, end = [], 0
        for line in LINE.findall(action)[: self.sums]:
            after, end = self.added(state, line), end + len(line)
            marks, state = [*marks, (end, (after[2] - state[2]) / self.sums)], after
        return Step(state, None, True, steps=marks)

    def added(self, state, text):
        """The state after a sum. Text that is no digit is wrong, and the next sum begins with the right one."""
        task, number, right, begin = state
        truth = (begin + task[number + 1]) % self.base
        told = int(text) if re.fullmatch(r"\s*[0-9]\s*", text) else None
        return task, number + 1, right + (told == truth), truth if told is None else told

    def score(self, state):
        return 0.0  # all is earned by turns or steps

    def success(self, state):
        return state[2] == self.sums

    def solution(self, task):
        totals = [str(sum(task[:end]) % self.base) for end in range(2, self.sums + 2)]
        return totals if self.turns else ["\n".join(totals)]

    def players(self):
        return {"right": self.play, "careless": partial(self.play, care=0.5), "wrong": lambda state, rng: "no"}

    def play(self, state, rng, care=1.0):
        """The next sum, or all of them, each right with this probability."""
        task, number, _, begin = state
        told = []
        for digit in task[number + 1 :]:
            begin = (begin + digit + (0 if rng.random() < care else rng.randrange(1, self.base))) % self.base
            told.append(str(begin))
        return told[0] if self.turns else "\n".join(told)


environment = RunningSums

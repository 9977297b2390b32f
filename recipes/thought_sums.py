"""Sums of two two-digit numbers, with room to think: `47+85` may be answered at once, or after a thought in which each
column is worked out: `<think>7+5=12;4+8+1=13</think>132`.

The environment of r1.toml and r1-zero.toml. The reward is DeepSeek-R1's (arXiv:2501.12948, section 2.2.2) in small:
`right`, 1 for the exact sum, and `format`, a tenth for a closed thought before a number. A policy that only answers at once
loses little by its form; what pays for a thought is that it makes the sum right.

A hash of the problem decides whether it is held out (one in eight is).
"""

import re

from shoal.env import Env, Score, Step, domain_hash, require_index
from shoal.graders.format import thought_first

ANSWER = re.compile(r"(?:<think>.*</think>)?([0-9]{1,4})", re.DOTALL)
THOUGHT = "<think>{}</think>"
LOWEST, NUMBERS = 10, 90
"""Operands are 10 to 99."""


class ThoughtSums(Env):
    name = "thought_sums"
    num_tasks, num_heldout = 1 << 14, 1024
    reward_bounds = (0.0, 1.1)
    weights = {"right": 1.0, "format": 0.1}

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        for attempt in range(10_000):
            drawn = int.from_bytes(domain_hash("thought sums", f"{index} {attempt}".encode()), "big")
            problem = f"{LOWEST + drawn % NUMBERS}+{LOWEST + drawn // NUMBERS % NUMBERS}"
            if (domain_hash("thought sums/held out", problem.encode())[0] % 8 == 0) == heldout:
                return problem
        raise AssertionError("one problem in eight is held out")

    def reset(self, task):
        return (task, None), [{"role": "user", "content": task}]

    def step(self, state, action):
        return Step((state[0], action.strip()), None, True)

    def score(self, state):
        task, said = state
        found = ANSWER.fullmatch(said or "")
        right = float(found is not None and int(found[1]) == total(task))
        form = thought_first(said or "") if found else 0.0
        return Score({"right": right, "format": form}, {"thought": float("<think>" in (said or ""))})

    def success(self, state):
        found = ANSWER.fullmatch(state[1] or "")
        return found is not None and int(found[1]) == total(state[0])

    def solution(self, task):
        return THOUGHT.format(columns(task, lambda digit: digit)) + str(total(task))

    def players(self):
        """right: thinks and is right. careful: thinks, and slips in one column of twenty. web: what a pretrained model has
        seen: mostly bare answers, half of them wrong, some thoughts with slips, and some text that is neither."""
        return {"right": lambda state, rng: self.solution(state[0]), "wrong": lambda state, rng: "0",
                "careful": play_careful, "web": play_web}  # fmt: skip


def total(task):
    first, second = task.split("+")
    return int(first) + int(second)


def columns(task, slip):
    """The thought: each column's sum, units first; `slip` may change one, and what follows is worked out from that."""
    first, second = task.split("+")
    units = slip(int(first[1]) + int(second[1]))
    carry = "+1" if units > 9 else ""
    tens = slip(int(first[0]) + int(second[0]) + (units > 9))
    return f"{first[1]}+{second[1]}={units};{first[0]}+{second[0]}{carry}={tens}"


def answer_of(thought):
    """What follows from a thought."""
    units, tens = (part.rpartition("=")[2] for part in thought.split(";"))
    return f"{tens}{units[-1]}"


def slipping(rng, share):
    return lambda digit: digit if rng.random() >= share else max(0, digit + rng.choice((-2, -1, 1, 2)))


def play_careful(state, rng):
    thought = columns(state[0], slipping(rng, 0.05))
    return THOUGHT.format(thought) + answer_of(thought)


def play_web(state, rng):
    kind = rng.random()
    if kind < 0.45:
        return str(max(0, total(state[0]) + rng.choice((0, 0, 0, -10, -1, 1, 10))))
    if kind < 0.9:
        thought = columns(state[0], slipping(rng, 0.1))
        return THOUGHT.format(thought) + answer_of(thought)
    return rng.choice(
        ("i do not know", THOUGHT.format("let me see"), "<think>" + columns(state[0], slipping(rng, 0.1)))
    )


environment = ThoughtSums

"""Add two numbers. A sound environment, of which tests break one thing each."""

from shoal.env import Env, Step, require_index


class Sums(Env):
    name = "sums"
    num_tasks, num_heldout = 40, 10

    def task(self, index, heldout=False):
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return 13 * index + 7, 100 + index + 40 * heldout

    def reset(self, task):
        return (task, ""), [{"role": "user", "content": f"What is {task[0]} + {task[1]}?"}]

    def step(self, state, action):
        return Step((state[0], action.strip()), None, True)

    def score(self, state):
        return float(state[1] == self.solution(state[0]))

    def solution(self, task):
        return str(sum(task))

    def players(self):
        return {"right": lambda state, rng: self.solution(state[0]), "wrong": lambda state, rng: "-1"}


environment = Sums

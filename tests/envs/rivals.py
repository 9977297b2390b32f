"""Only the longest answers of a group earn something. For tests of comparisons."""

from shoal.env import Env, Step, require_index


class Rivals(Env):
    name, num_tasks = "rivals", 8

    def task(self, index, heldout=False):
        require_index(index, 0 if heldout else self.num_tasks)
        return index

    def reset(self, task):
        return "", [{"role": "user", "content": f"be longer than the others in {task}"}]

    def step(self, state, action):
        return Step(str(action), "", True)

    def score(self, state):
        return 0.0

    def group_scores(self, states):
        """1 for each of the longest answers."""
        most = max(map(len, states))
        return [float(len(state) == most) for state in states]


def environment():
    return Rivals()

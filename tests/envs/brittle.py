"""An environment that fails on some answers, the same ones each time. For tests of faults."""

from hashlib import sha256

from shoal.env import Env, Step, require_index


class Brittle(Env):
    name, num_tasks = "brittle", 16

    def __init__(self, every=16, outside=0, compared=False):
        """It raises on one answer in `every`, and scores one in `outside` twice as high as it may; 0 is none."""
        self.every, self.outside = every, outside
        if compared:
            self.group_scores = self._compared

    def task(self, index, heldout=False):
        require_index(index, 0 if heldout else self.num_tasks)
        return index

    def reset(self, task):
        return (task, 0), [{"role": "user", "content": f"what follows {task}?"}]

    def step(self, state, action):
        drawn = int.from_bytes(sha256(f"{state[0]} {action}".encode()).digest()[:4], "big")
        if self.every and drawn % self.every == 0:
            raise KeyError(f"no answer such as {drawn % 7}")
        return Step((state[0], drawn), "", True)

    def score(self, state):
        _, drawn = state
        if self.outside and drawn // 64 % self.outside == 0:
            return 2.0
        return drawn // 1024 % 3 / 2

    def _compared(self, states):
        """Nothing more, but it fails on a group of which two are alike."""
        if len(set(states)) < len(states):
            raise ValueError("two answers are alike")
        return [0.0] * len(states)


def environment(every=16, outside=0, compared=False):
    return Brittle(every, outside, compared)

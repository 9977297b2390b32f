"""Add two numbers of a table, which was changed after it was pinned."""

from pathlib import Path

from shoal.env import DatasetEnv, Step

DATA = Path(__file__).parent / "sums.jsonl"
SHA256 = "6b8c0c2b4c1c2d0a8a4e6c1f1d5b7a9fe2d3c4b5a697887960514233241506f7"


class Sums(DatasetEnv):
    name = "sums"

    def reset(self, task):
        return (task, ""), [{"role": "user", "content": task["question"]}]

    def step(self, state, action):
        return Step((state[0], action.strip()), None, True)

    def score(self, state):
        return float(state[1] == state[0]["answer"])

    def solution(self, task):
        return task["answer"]


def environment():
    return Sums(DATA, SHA256, heldout=2)

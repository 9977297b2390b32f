"""Word problems of grade school from a data set, with problems held out: those beside this file, or GSM8K's.

The data are pinned by their SHA-256: changed data are refused, so that all who repeat an episode have the same problems.
The reward is 1 if the number behind the last "####" is the answer.

GSM8K (arXiv:2110.14168) is train.jsonl and test.jsonl of github.com/openai/grade-school-math; recipes/qwen3-0.6b-gsm8k.toml
gives their paths and hashes.
"""

from pathlib import Path
from typing import NamedTuple

from shoal.env import DatasetEnv, Step
from shoal.graders.extract import last_number
from shoal.graders.number_answers import numeric

PROBLEMS = Path(__file__).parent / "problems.jsonl"
SHA256 = "ec6ef28cd61968ff8cd5017e56708cb3824009d050c772d0b2eb038ce54fcca1"
ASK = "Solve the problem step by step. End with a line that holds #### and the answer as a number.\n\n"


class Problem(NamedTuple):
    question: str
    answer: str


class WordProblems(DatasetEnv):
    name = "word-problems"

    def reset(self, task):
        return (task, ""), [{"role": "user", "content": ASK + task.question}]

    def step(self, state, action):
        return Step((state[0], action), None, True)

    def score(self, state):
        return numeric(last_number(state[1].rpartition("####")[2]), state[0].answer).score

    def success(self, state):
        return self.score(state) == 1.0

    def solution(self, task):
        return f"#### {task.answer}"

    def players(self):
        return {"right": lambda state, rng: self.solution(state[0]), "wrong": lambda state, rng: "#### -123456789"}


def problem(row):
    """The answer of a row is its explanation, which ends with #### and the number."""
    return Problem(row["question"], row["answer"].rpartition("####")[2].strip())


def environment(path=PROBLEMS, sha256=SHA256, heldout=8, heldout_path="", heldout_sha256=""):
    """Rows are held out of `path`, or are those of `heldout_path`."""
    return WordProblems(path, sha256, heldout, heldout_path, heldout_sha256, problem)

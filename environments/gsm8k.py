"""GSM8K: grade-school word problems (arXiv:2110.14168), from the two JSON-lines files that its authors published.

An environment as an outsider would write it: one file, whose path is given in a run file. It downloads nothing. Get
`train.jsonl` and `test.jsonl` from https://github.com/openai/grade-school-math and give their folder:

    shoal env check environments/gsm8k.py --env-args '{"folder": "data/gsm8k"}'

Single-turn. The reward is 1 if the number after the last "####", or without "####" the last number, is the answer.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.envs.base import Env, Step, require_index
from shoal.errors import ConfigError

NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
ASK = "Solve the problem step by step. End with a line that holds #### and the answer as a number.\n\n"


def environment(folder: str = "data/gsm8k") -> "Gsm8k":
    """Make the environment from a folder with `train.jsonl` and `test.jsonl`."""
    return Gsm8k(_read(Path(folder) / "train.jsonl"), _read(Path(folder) / "test.jsonl"))


class Gsm8k(Env):
    """A task is (question, answer); a state is the task and the policy's answer."""

    name = "gsm8k"

    def __init__(self, train: list[tuple[str, str]], test: list[tuple[str, str]]) -> None:
        self.train, self.test = train, test
        self.num_tasks, self.num_heldout = len(train), len(test)

    def task(self, index: int, heldout: bool = False) -> tuple[str, str]:
        require_index(index, self.num_heldout if heldout else self.num_tasks)
        return (self.test if heldout else self.train)[index]

    def reset(self, task: tuple[str, str]) -> tuple[Any, list[dict[str, str]]]:
        return (task, ""), [{"role": "user", "content": ASK + task[0]}]

    def step(self, state: Any, action: str) -> Step:
        return Step((state[0], action), None, True)

    def score(self, state: Any) -> float:
        (_, answer), given = state
        return float(last_number(given) == answer)

    def success(self, state: Any) -> bool:
        """Whether the answer is right."""
        return self.score(state) == 1.0

    def players(self) -> dict[str, Callable[[Any, random.Random], str]]:
        """Players for `shoal env check`."""
        return {"right": lambda state, rng: f"#### {state[0][1]}", "wrong": lambda state, rng: "#### -123456789"}


def last_number(text: str) -> str:
    """The number after the last "####", or else the last number, without commas and trailing zeros; "" if none."""
    found = NUMBER.findall(text.rpartition("####")[2]) or NUMBER.findall(text)
    if not found:
        return ""
    number = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [(line["question"], last_number(line["answer"])) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a GSM8K file: {error!r}. Give its folder in envs.0.args.folder") from None

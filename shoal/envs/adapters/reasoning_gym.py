"""Any task of the package `reasoning_gym`, by its name: one question, one answer, scored by the package.

An environment file calls `environment`, in an interpreter that has the package. Each task is generated from a seed and
its index. Held-out tasks use another seed.
"""

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.env import Player, Score
from shoal.envs.adapters.episode import Episode, GeneratorEnv, Problem, TurnsSoFar
from shoal.envs.adapters.message_conversion import spoken
from shoal.errors import ShoalError

HASH_DEPENDENT = Path(__file__).with_name("reasoning_gym_hash.json")
"""Tasks whose questions or scores differ between hash seeds, as measured by deploy/reasoning_gym_hash.py."""

HELDOUT_SEED = 1 << 31
"""Added to the seed for held-out tasks. The seed itself must be lower."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What a few tasks raise for an answer that they cannot read. Such an answer is wrong."""


class ReasoningGym(GeneratorEnv):
    """A task of reasoning_gym."""

    def __init__(
        self, task: str, tasks: int = 1000, heldout: int = 100, seed: int = 0, system: str = "",
        config: Mapping[str, Any] = {},
    ) -> None:  # fmt: skip
        """`task` is its name in reasoning_gym, such as "basic_arithmetic"; `config` is passed to its generator."""
        import reasoning_gym

        if not 0 <= seed < HELDOUT_SEED:
            raise ShoalError(f"seed = {seed}: give a number from 0 to {HELDOUT_SEED - 1}")
        self.name, self.num_tasks, self.num_heldout = f"reasoning_gym/{task}", tasks, heldout
        self.reproducible = task not in hash_dependent() or not sys.flags.hash_randomization
        try:
            self._sets = [
                reasoning_gym.create_dataset(task, **{**config, "seed": seed + shift, "size": max(1, size)})
                for shift, size in ((0, tasks), (HELDOUT_SEED, heldout))
            ]
        except (ValueError, TypeError, AssertionError) as fault:
            raise ShoalError(f"reasoning_gym cannot make task {task}: {' '.join(str(fault).split())[:200]}") from None
        self._system = system or reasoning_gym.utils.SYSTEM_PROMPTS["default"]
        self._extract = reasoning_gym.utils.extract_answer

    def content(self, index: int) -> Any:
        heldout = index >= self.num_tasks
        return self._sets[heldout][index - self.num_tasks * heldout]["question"]

    def episode(self, task: Problem) -> Episode:
        dataset = self._sets[task.heldout]
        entry = dataset[task.number]
        action = yield [{"role": "system", "content": self._system}, {"role": "user", "content": entry["question"]}]
        answer = self._extract(spoken(action or ""))
        try:
            score = float(dataset.score_answer(answer=answer, entry=entry))
        except UNREADABLE:
            score = 0.0
        return Score({"answer": score}, {"formatted": float(answer is not None)})

    def players(self) -> Mapping[str, Player]:
        """A player that gives the package's answer, and one that gives none. No players if tasks come without answers."""
        if self._sets[False][0]["answer"] is None:
            return {}

        def right(state: TurnsSoFar, rng: random.Random) -> str:
            return f"<answer>{self._sets[state.task.heldout][state.task.number]['answer']}</answer>"

        return {"right": right, "wrong": lambda state, rng: "<answer></answer>"}


def hash_dependent() -> Mapping[str, str]:
    """The tasks that depend on the hash seed, and what differs in each."""
    found: Mapping[str, str] = json.loads(HASH_DEPENDENT.read_text())["tasks"]
    return found


environment = ReasoningGym

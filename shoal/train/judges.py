"""The frozen model that decides what a run's rollouts are worth, if its algorithm has one: opened from where it is.

Called by `roles/trainer` and `recipes/one_file.py` when they start. It refuses a model that reads token ids otherwise than
the policy does: its judgement would be of another text. It neither computes nor compares bytes with an earlier start.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.config import RunConfig
from shoal.errors import StateError
from shoal.policy.kinds import open_policy, spec_of
from shoal.policy.valued import load_valued
from shoal.policy.vocabulary import demand_same_vocabulary
from shoal.protocol.algorithms import judge_named
from shoal.train.masters import module_dtype
from shoal.train.rows import Row
from shoal.train.scores import RewardModel
from shoal.train.teacher import Teacher


class Judge(Protocol):
    """What gives rows their advantages before a step."""

    def __call__(
        self, rows: Sequence[Row], student: Callable[[Sequence[Row]], Sequence[np.ndarray]]
    ) -> tuple[list[Row], dict[str, float]]:
        """The rows with advantages, and figures of the step. `student` computes log-probs under the policy that learns."""


def judge_of(config: RunConfig, policy: Path, device: str = "cpu") -> Judge | None:
    """The judge of a run whose first policy is in a directory; None if groups are judged by their rewards alone, or by a
    critic. Raises `StateError`."""
    named = judge_named(config.train.algorithm)
    if not named:
        return None
    directory = Path(getattr(config.train, named))
    demand_same_vocabulary(directory, policy, f"train.{named}")
    longest, positions = config.sampling.max_tokens, spec_of(directory).max_positions
    if positions < longest:  # guard: judge-reads-whole-rows
        raise StateError(
            f"train.{named} = {directory}: it reads at most {positions} tokens, and a row may have sampling.max_tokens = "
            f"{longest}: choose another model, or lower that"
        )
    dtype, budget = module_dtype(config.train), config.train.microbatch_tokens
    if named == "teacher":
        frozen = open_policy(directory, dtype, config.policy.implementation).to(device)
        return Teacher(frozen, config.sampling.temperature, budget)
    return RewardModel(load_valued(directory, dtype).to(device), budget)

"""Algorithms and their arguments: what `[train.algorithm]` of a run file holds, and what the rules of a run name.

Read by the ledger, the trainer and auditors. Each algorithm is a type with a tag, `name`. This file has no formula: those
are in `algos`. For each type, `ledger/algorithm` finds what a group teaches, and `train/objective` finds the loss. All but
the first are compositions.
"""

from typing import Literal

import msgspec

from shoal.protocol import compositions
from shoal.protocol.compositions import AnyComposition, Composition, StepCredit, Vine


class Grpo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="grpo"):
    """GRPO with clipping on both sides (INTELLECT-2, arXiv:2505.07291)."""

    advantage: Literal["mean", "mean_std"] = "mean"
    """mean: the reward minus the group's mean. mean_std: that divided by the group's standard deviation."""
    epsilon: float = 0.2
    """Clip range of the importance ratio, on both sides of 1."""
    delta: float = 4.0
    """Upper bound of the ratio if the advantage is negative (INTELLECT-2)."""
    entropy_bonus: float = 0.0
    """Weight of the mean entropy, nats per token."""


Algorithm = Grpo | AnyComposition
"""What a run names."""

DEFAULT = "grpo"
"""The algorithm of a run file that gives arguments and no name."""


def defaults_of(name: object) -> Algorithm | None:
    """The algorithm with this name as it is if a run file overrides nothing."""
    for kind in (Grpo, Composition, *compositions.NAMED):
        if kind.__struct_config__.tag == name:
            return kind()
    return None


def needs_reference(algorithm: Algorithm) -> bool:
    """Whether the trainer must keep the run's first policy."""
    return isinstance(algorithm, Composition) and algorithm.kl.beta > 0


def needs_critic(algorithm: Algorithm) -> bool:
    """Whether a critic of the trainer's decides what tokens are worth."""
    return isinstance(algorithm, Composition) and algorithm.advantage == "gae"


def credits_tokens(algorithm: Algorithm) -> bool:
    """Whether the tokens of a rollout may have different advantages, before any penalty."""
    credited = isinstance(algorithm, Composition) and bool(algorithm.credit)
    return credited or needs_critic(algorithm) or judge_named(algorithm) == "teacher"


def judge_named(algorithm: Algorithm) -> Literal["", "teacher", "reward_model"]:
    """The key of `[train]` with the frozen model that decides what rollouts are worth; empty if none does."""
    if isinstance(algorithm, Composition) and algorithm.advantage in ("teacher", "reward_model"):
        return algorithm.advantage
    return ""


def judged_by_trainer(algorithm: Algorithm) -> bool:
    """Whether a model of the trainer's decides what rollouts are worth, and not their rewards alone."""
    return needs_critic(algorithm) or bool(judge_named(algorithm))


def vine_of(algorithm: Algorithm) -> Vine | None:
    """The settings of continuations, if the algorithm learns from any."""
    credit = algorithm.credit if isinstance(algorithm, Composition) else None
    return credit if isinstance(credit, Vine) else None


def step_credit_of(algorithm: Algorithm) -> StepCredit | None:
    """The settings of rewards for turns or steps, if the algorithm learns from any. Then verdicts and batches have them."""
    credit = algorithm.credit if isinstance(algorithm, Composition) else None
    return credit if isinstance(credit, StepCredit) else None


def narrowest_bound(algorithm: Algorithm) -> float:
    """How far from 1 an importance ratio may be before any bound of the algorithm removes or cuts a gradient; 0 if a
    claimed log-prob may count without limit, so that the trainer must compute all of them itself."""
    return algorithm.epsilon if isinstance(algorithm, Grpo) else compositions.narrowest_bound(algorithm)

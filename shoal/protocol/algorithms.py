"""Algorithms and their arguments: what `[train.algorithm]` of a run file holds, and what the rules of a run name.

Read by the ledger, the trainer and auditors. Each algorithm is a type with a tag, `name`. This file has no formula: those
are in `algos`. For each type, `ledger/algorithm` finds what a group teaches, and `train/objective` finds the loss.
"""

from typing import Literal

import msgspec


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


Algorithm = Grpo
"""One of the types above: what a run names."""

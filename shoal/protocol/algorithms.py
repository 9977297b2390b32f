"""Algorithms and their arguments: what `[train.algorithm]` of a run file holds, and what the rules of a run name.

Read by the ledger, the trainer and auditors. Each algorithm is a type with a tag, `name`. It knows no formula: those are
in `algos`. `ledger/algorithm` finds the half that says what a group teaches, `train/objective` the loss.
"""

from typing import Literal

import msgspec


class Grpo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="grpo"):
    """GRPO with clipping on both sides (INTELLECT-2, arXiv:2505.07291)."""

    advantage: Literal["mean", "mean_std"] = "mean"
    """Reward minus group mean, or that divided by the group's standard deviation."""
    epsilon: float = 0.2
    """Clip range of the importance ratio, both sides."""
    delta: float = 4.0
    """Upper bound of the ratio where the advantage is negative (INTELLECT-2)."""
    entropy_bonus: float = 0.0
    """Weight of the mean entropy, nats per token."""


Algorithm = Grpo
"""Of the types above, the one that a run names."""

"""What a run of a grid may have beside its run file, as data.

Filled in by `grid_beside`, and read by `harness` and `preferred`. It is part of a run's key.
"""

from typing import Any, Literal

import msgspec

from shoal.protocol.algorithm_config import Vine

Tree = dict[str, Any]


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tasks are kept by an offline filter, before the first step."""

    rollouts: int
    """Of each task, to measure its solve rate."""
    low: float
    high: float


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How values of states are compared with the true ones, in a corridor."""

    every: int
    """Steps from one probe to the next."""
    groups: int
    """Of a step's groups, the first so many."""
    vine: Vine
    """The states, and the continuations from each."""


class Preferences(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run learns from pairs: see `preferred`."""

    way: Literal["dpo", "reward_model", "truth"]
    """dpo: from the pairs. reward_model: by RL, with a reward model that is learned from the pairs. truth: by RL, with the
    true utility."""
    pairs: int
    steps: int
    """Of DPO, or of the reward model."""
    batch: int
    """Pairs a step."""
    scores_lr: float
    """Learning rate of the reward model."""
    beta: float
    """Weight of the KL to the first policy."""


class Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run has beside its run file."""

    teacher: Tree = {}
    """The recipe of its teacher, to which tests compare the policy."""
    imitates: bool = False
    """Whether it learns from the teacher's rollouts, by SFT."""
    heldout: bool = False
    """Whether tests are on held-out tasks."""
    filtered: Filter | None = None
    probe: Probe | None = None
    preferences: Preferences | None = None

"""Which groups and rollouts of a batch the trainer may learn from: a second check of signal and staleness, and of length.

The coordinator fills batches by the same two rules. The trainer applies them itself, so that no coordinator can make it
learn from rollouts that are too old. It knows nothing of tokens or tensors.

Some algorithms learn nothing from rollouts that a token limit ended. That is decided here, because the ledger counts
groups. Such rollouts stay in the divisor of the average, as in TRL.

Rollouts with a large log-ratio are the loss's business: a clip mutes their tokens one by one, and the row masks of
`algos/corrections` drop them by log-probs that the trainer itself computed. Nothing is dropped here by what a worker
claims: it could withdraw a rollout after seeing its reward.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.ledger.group_signal import teaches
from shoal.protocol.algorithm_config import Algorithm
from shoal.protocol.messages import BatchGroup
from shoal.train.rows import TrainingRow, counted_only, learned, one_of_each


class Selection(NamedTuple):
    """The rows of a step, in the order of the batch, and the number left out."""

    rows: list[TrainingRow]
    """Empty if nothing is learned from any of them."""
    groups_without_signal: int
    stale_rollouts: int
    overlong_rollouts: int = 0


def select(
    members: Sequence[BatchGroup],
    rows_G: Sequence[Sequence[TrainingRow]],
    *,
    algorithm: Algorithm,
    version: int,
    max_staleness: int,
) -> Selection:
    """Drop groups that teach the algorithm nothing, and each rollout sampled by a policy too old for (or newer than)
    `version`.

    `rows_G` has the rows of each member; they are empty if nothing can be learned from it. `version` is the policy about to
    be updated. The other rollouts of a group stay, and keep their advantages.
    """
    signal = [teaches(member.rewards, algorithm, member.steps, member.faults) for member in members]
    candidates = [row for rows, keep in zip(rows_G, signal, strict=True) if keep for row in rows]
    fresh = [row for row in candidates if 0 <= version - row.version <= max_staleness]
    rows = [counted_only(row) if algorithm.mask_overlong and row.overlong else row for row in fresh]
    kept = learned(rows)
    return Selection(
        rows if kept else [],
        signal.count(False),
        len(one_of_each(candidates)) - len(one_of_each(fresh)),
        len(one_of_each(learned(fresh))) - len(one_of_each(kept)),
    )

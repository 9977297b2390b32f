"""A batch as the trainer reads it: which of its rollouts it may learn from, and signs of reward hacking.

The coordinator fills batches by the same two rules. The trainer applies them itself, so that no coordinator can make it
learn from rollouts that are too old.

Some algorithms learn nothing from rollouts that a token limit ended. That is decided here, because the ledger counts
groups. Such rollouts stay in the divisor of the average, as in TRL.

Rollouts with a large log-ratio are the loss's business: a clip mutes their tokens one by one, and the row masks of
`algos/corrections` drop them by log-probs that the trainer itself computed. Nothing is dropped here by what a worker
claims: it could withdraw a rollout after seeing its reward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.algos.reward_shaping import loop_share, rank_correlation
from shoal.ledger.group_advantages import teaches
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


# --- Signs of reward hacking: do a batch's rollouts repeat themselves, and does reward follow length? ---


def signs_of(rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """The metrics of a batch's rows; none if it has none."""
    tokens: dict[object, list[NDArray[np.int64]]] = {}
    rewards: dict[object, float] = {}
    for i, row in enumerate(rows):
        tokens.setdefault(row.id or i, []).append(row.tokens_T[row.positions_P])
        rewards[row.id or i] = row.reward
    if not tokens:
        return {}
    written = {rollout: np.concatenate(parts) for rollout, parts in tokens.items()}
    groups: dict[object, list[object]] = {}
    for name in written:
        groups.setdefault(name[:2] if isinstance(name, tuple) else None, []).append(name)
    follows = [
        found
        for members in groups.values()
        if (found := rank_correlation([rewards[m] for m in members], [len(written[m]) for m in members])) is not None
    ]
    return {
        "repetition_share": float(np.mean([loop_share(tokens_P) for tokens_P in written.values()])),
        "reward_length_correlation": float(np.mean(follows)) if follows else None,
    }

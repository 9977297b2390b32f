"""What a batch shows of reward hacking, as metrics: do its rollouts repeat themselves, and does reward follow length?

`hacking` of `shoal/monitors/learning` judges the figures. Nothing is learned from them.

Axes: P policy tokens of a rollout.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.algos.reward_shaping import loop_share, rank_correlation
from shoal.train.rows import TrainingRow


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

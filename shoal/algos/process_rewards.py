"""Rewards for each step of an answer: GRPO with process supervision, from DeepSeekMath (arXiv:2402.03300, section 4.1.3).

Called by `ledger/algorithm` in runs whose credit is named "steps". numpy alone. It does not judge steps: environments do.

    symbol       meaning                                                                   argument
    r_i^j        reward of step j of rollout i                                             rewards_G_S
    R            all step rewards of the group, one list
    r~_i^j       (r_i^j - mean(R)) / std(R)
    A_i^j        sum of r~_i^k over the steps k >= j: the advantage of every token of step j

The mean is over steps, so a rollout of many average steps counts as much as one of a few: the number of steps earns
nothing. With one step in each rollout this is the outcome's advantage of `grpo_advantages`.

Changed from the paper: the deviation is left out unless asked for, as in Dr. GRPO (arXiv:2503.20783), and is the sample's
(ddof = 1) with the floor of `grpo_advantages`.

Axes: G rollouts of one group; S steps of a rollout, which differ in number.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal.algos.grpo_advantages import STD_FLOOR


def process_advantages(
    rewards_G_S: Sequence[Sequence[float]], method: Literal["mean", "mean_std"] = "mean"
) -> list[NDArray[np.float32]]:
    """A of each step of each rollout, computed in float64 and rounded once. A rollout may have no steps."""
    steps = [np.asarray(rewards_S, dtype=np.float64) for rewards_S in rewards_G_S]
    R = np.concatenate([np.empty(0), *steps])
    if not R.size:
        return [np.empty(0, np.float32) for _ in steps]
    scale = R.std(ddof=1) + STD_FLOOR if method == "mean_std" and R.size > 1 else 1.0
    return [np.cumsum(((r_S - R.mean()) / scale)[::-1])[::-1].astype(np.float32) for r_S in steps]


def step_rewards_differ(rewards_G_S: Sequence[Sequence[float]]) -> bool:
    """Whether any two steps of the group have different rewards: otherwise no step is worth more than another."""
    return len({reward for rewards_S in rewards_G_S for reward in rewards_S}) > 1

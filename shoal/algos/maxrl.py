"""MaxRL's advantages: they make the policy gradient one of the log-likelihood of success (arXiv:2602.02710).

Called through `ledger/algorithm`, as `grpo_advantages`. numpy alone, so that the coordinator may import it.

    symbol   meaning                                           argument
    R_i      1 if rollout i of the group succeeded, else 0     rewards_G
    p        probability of success of one task
    A_i      (R_i - mean(R)) / mean(R)

The policy gradient is that of the sum of p over tasks, so easy tasks count as much as hard ones. The gradient of log p is
1/p times as large, which gives most weight to tasks that are seldom solved. With the group's mean in the place of p, the
estimate approximates the gradient of log p the better, the larger the group is.

Changed from the paper: rewards may be any numbers from 0 on. A group whose mean is not positive teaches nothing.

Axes: G rollouts of one group.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def maxrl_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once; 0 if the mean is not positive."""
    R_G = np.asarray(rewards_G, dtype=np.float64)
    mean = R_G.mean()
    return ((R_G - mean) / mean if mean > 0 else np.zeros_like(R_G)).astype(np.float32)


def maxrl_has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether any advantage differs from 0."""
    return min(rewards_G) < max(rewards_G) and bool(np.mean(rewards_G) > 0)

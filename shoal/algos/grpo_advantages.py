"""The numpy half of GRPO: how much better than its siblings each rollout of a group did, and whether any did.

Called through `ledger/algorithm`, by the ledger, the trainer and auditors. numpy alone, so that the coordinator may
import it. The loss is in `ppo.py`. It knows nothing of tokens, clips or models.

    symbol   meaning                                       where
    R_i      reward of rollout i of the group              DeepSeekMath, arXiv:2402.03300, section 4.1.2
    A_i      its advantage, the same for all its tokens
    G        rollouts of the group

Axes: G rollouts of one group.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

STD_FLOOR = 1e-6
"""Added to the standard deviation, in units of reward: almost equal rewards must not give huge advantages."""


def group_advantages(rewards_G: Sequence[float], method: Literal["mean", "mean_std"]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once.

    "mean": A_i = R_i - mean(R), as in Dr. GRPO (arXiv:2503.20783): dividing by the deviation gives most weight to tasks
    that are nearly solved or nearly hopeless. "mean_std": the paper's A_i = (R_i - mean(R)) / (std(R) + 1e-6), with the
    sample deviation (ddof = 1), as in INTELLECT-2.
    """
    R_G = np.asarray(rewards_G, dtype=np.float64)
    A_G = R_G - R_G.mean()
    if method == "mean_std":
        A_G = A_G / (R_G.std(ddof=1) + STD_FLOOR)
    return A_G.astype(np.float32)


def rewards_differ(rewards_G: Sequence[float]) -> bool:
    """Whether the rewards differ at all: a group in which they do not has advantage 0 everywhere and teaches nothing.

    This compares the rewards, not their deviation: after rounding, equal rewards such as 0.1 have a deviation of 1e-17.
    """
    return min(rewards_G) < max(rewards_G)

"""RLOO's advantages: the reward of a rollout minus the mean of the others (arXiv:2402.14740, section 3; Kool et al. 2019).

Called through `ledger/algorithm`, as `grpo_advantages`. numpy alone, so that the coordinator may import it.

    symbol   meaning                                                        argument
    R_i      reward of rollout i of the group                               rewards_G
    A_i      R_i - 1/(G - 1) sum_{j != i} R_j  =  G/(G - 1) (R_i - mean(R))

The baseline of a rollout leaves that rollout out, so the estimate of the gradient has no bias. With the mean of the whole
group it is (G - 1)/G times as long.

Axes: G rollouts of one group.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rloo_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once. A group has at least two rollouts."""
    R_G = np.asarray(rewards_G, dtype=np.float64)
    return (R_G - (R_G.sum() - R_G) / (len(R_G) - 1)).astype(np.float32)

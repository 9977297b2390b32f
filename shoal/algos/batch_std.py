"""Advantages in units of their deviation over the batch: ScaleRL (arXiv:2510.13786) and REINFORCE++ (arXiv:2501.03262).

Called by `train/averaging` once a step. numpy alone; it knows neither tokens nor losses.

    symbol   meaning                                                   argument
    A_i      advantage of rollout i of the batch; with a critic, a
             teacher or continuations, of token i                      A_I
    A'_i     A_i / (std(A) + 1e-6), with the deviation of all I        A_i times the result

Dividing by the deviation of the group instead (GRPO) gives most weight to tasks that are nearly solved or nearly hopeless.
The batch's is the same for all tasks, so it changes only the size of the step. The mean is not subtracted: advantages
already have a baseline.

Axes: I rollouts of a batch, or tokens.
"""

import numpy as np
from numpy.typing import NDArray

from shoal.algos.grpo_advantages import STD_FLOOR


def batch_scale(A_I: NDArray[np.float64]) -> float:
    """What each advantage of the batch is multiplied by: 1 if all are equal, as when a batch has only one rollout left."""
    std = float(A_I.std())
    return 1 / (std + STD_FLOOR) if std > STD_FLOOR else 1.0  # guard: equal-advantages-keep-their-size

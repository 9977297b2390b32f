"""What a step's rows count, by the run's algorithm: the part of the loss that is decided before micro-batches are made.

An average over rollouts or prompts needs the whole batch, and a micro-batch has only some rows. So it becomes a weight of
each token, and a loss divides by nothing but the number of policy tokens. It uses no model.

Axes: P policy tokens of a row.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from shoal.algos.advantages import batch_scale
from shoal.algos.entropy_target import bonus_share
from shoal.algos.loss_averaging import token_weights
from shoal.protocol.algorithm_config import Algorithm, credits_tokens
from shoal.train.rows import TrainingRow, learned, one_of_each


def normalised(rows: Sequence[TrainingRow], algorithm: Algorithm) -> Sequence[TrainingRow]:
    """The rows of a batch with their advantages as the algorithm normalises them over the batch: the same rows if it does
    not. A rollout that is only counted has a part in the deviation, as in TRL, if it has an advantage."""
    if not algorithm.batch_std:
        return rows
    if credits_tokens(algorithm):  # whose advantages differ from token to token
        A_I = np.concatenate([row.advantage_P for row in learned(rows)]).astype(np.float64)
    else:
        A_I = np.array([row.advantage_P.mean() for row in one_of_each(rows) if len(row.advantage_P)], dtype=np.float64)
    scale = batch_scale(A_I)
    return [replace(row, advantage_P=(row.advantage_P * scale).astype(np.float32)) for row in rows]


def bonus_of(rows: Sequence[TrainingRow], algorithm: Algorithm) -> float:
    """How much of the entropy bonus a step from these rows has."""
    return bonus_share(np.concatenate([row.behaviour_logp_P for row in rows]), algorithm.entropy_target)


def averaged(rows: Sequence[TrainingRow], algorithm: Algorithm, max_tokens: int) -> Sequence[TrainingRow]:
    """The rows that an update learns from, with weights that make the sum over tokens, divided by their number, the
    algorithm's average.

    Rows that are only counted are in its divisor, and are left out. `max_tokens` is the most that a rollout may have. The
    mean over tokens leaves the rows as they are.
    """
    counts_all = not any(row.counts_only for row in rows)
    if algorithm.average == "tokens":
        return rows if counts_all else learned(rows)
    rollout_R: list[Hashable] = [i if row.id is None else row.id for i, row in enumerate(rows)]
    prompt_R: list[Hashable] = [i if row.group is None else row.group for i, row in enumerate(rows)]
    L = algorithm.divisor_tokens or float(max_tokens)
    assert L > 0 or algorithm.average != "constant", (
        "a constant average needs a divisor: give `Learner` the most tokens of a rollout"
    )
    w_R = token_weights(
        [len(row.positions_P) for row in rows], rollout_R, prompt_R, average=algorithm.average, L=L
    )  # fmt: skip
    return [
        replace(row, weight_P=(row.weight_P * w).astype(np.float32))
        for row, w in zip(rows, w_R.tolist(), strict=True)
        if not row.counts_only
    ]

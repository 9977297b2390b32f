"""At start-up, check that generation and training see the same policy by replaying one completion.

A wrong mask, temperature or tokenizer shows as a difference in nats; two honest implementations differ by about 1e-5 in
float32. The role, not this file, decides what to do about a difference. It does not know what made the row.
"""

from collections.abc import Sequence

import numpy as np

from shoal.train.learner import Learner
from shoal.train.rows import TrainingRow, learned


def row_to_check(rows: Sequence[TrainingRow], version: int) -> TrainingRow | None:
    """The longest row that a version sampled; None if it sampled none from which something is learned."""
    return max(
        (row for row in learned(rows) if row.version == version), key=lambda row: len(row.tokens_T), default=None
    )


def largest_gap_nats(learner: Learner, row: TrainingRow) -> float:
    """Largest |log-prob of the learner - log-prob of the worker| over the policy tokens of a row."""
    return float(np.abs(learner.logprobs([row])[0] - row.behaviour_logp_P).max())

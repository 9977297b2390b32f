"""The check at start-up that generation and training see the same policy: replay one completion.

Called by `roles/trainer` with its first row that the current version sampled, before it learns from anything.
A wrong mask, temperature or tokenizer shows here as nats; two honest implementations differ by about 1e-5 in float32.
It knows neither what made the row nor what to do about a difference: that is the role's to say.
"""

import numpy as np

from shoal.train.rows import Row
from shoal.train.step import Learner


def largest_gap_nats(learner: Learner, row: Row) -> float:
    """Largest |log-prob of the learner - log-prob of the worker| over the policy tokens of a row."""
    return float(np.abs(learner.logprobs([row])[0] - row.behaviour_logp_P).max())

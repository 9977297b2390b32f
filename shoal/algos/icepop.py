"""IcePop: importance weights within a band, and none outside it (Ring-1T, arXiv:2510.18855, section 3).

Called by `train/objective` for each micro-batch, if the run asks for it. Pure: as `truncated`, which cuts weights instead
of dropping tokens.

    symbol   meaning                                                               argument
    mu       the policy that sampled, perhaps quantised or of an older version     mu_logp_N
    pi_old   the policy that learns, before the step's first update                old_logp_N
    a, b     smallest and largest weight                                           least, most
    w        k = pi_old(o) / mu(o) of one token if a <= k <= b, else 0             the result

A token on which sampler and trainer differ by so much says more about their arithmetic than about the answer. The paper
has 0.5 and 5; INTELLECT-3 (arXiv:2512.16144) takes them, too.

Axes: N policy tokens of a micro-batch.
"""

from torch import Tensor

from shoal.algos.ratios import exp_of
from shoal.algos.truncated import Truncated


def icepop_weights(old_logp_N: Tensor, mu_logp_N: Tensor, *, least: float, most: float) -> Truncated:
    """w of each token, and which are 0: constants, through which no gradient flows."""
    k_N = exp_of((old_logp_N - mu_logp_N).detach())
    dropped_N = (k_N < least) | (k_N > most)
    return Truncated(k_N.masked_fill(dropped_N, 0.0), dropped_N)

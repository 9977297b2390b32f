"""Entropy control: how much of the entropy bonus a step has, so that entropy stays near a target.

numpy alone; the bonus itself is in `entropy`.

    symbol   meaning                                                                  argument
    H        entropy of the policy that sampled, a token, estimated from its tokens:  -mean(log mu(o)), from mu_logp_N
    H*       target, nats a token                                                     target
    s        share of the bonus:   2 (1 - H / H*), at least 0 and at most 1           the result

All of the bonus below half of the target, and none above it. The estimate of H has no bias, because tokens are drawn from
mu. Skywork-OR1 (arXiv:2505.22312, section 4) adds to or takes from the weight of the bonus after each step, and applies it
only while H is at most H*. Changed: s depends on the batch alone, so there is no state to save, and a repeated step has
the same bits. In exchange, entropy may settle anywhere between half of the target and the target.

Axes: N policy tokens of a batch.
"""

import numpy as np
from numpy.typing import NDArray


def bonus_share(mu_logp_N: NDArray[np.float32], target: float) -> float:
    """s of a batch; a target of 0 gives all of the bonus."""
    if target == 0:
        return 1.0
    H = -float(mu_logp_N.astype(np.float64).mean())
    return min(1.0, max(0.0, 2 * (1 - H / target)))

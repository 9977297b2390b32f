"""A penalty on the squared log-ratio: it pulls the policy back to the one that sampled.

Called by `train/objective` for each micro-batch. Pure: it uses no model, optimiser or batch beyond its arguments.

    symbol   meaning                              argument
    mu       the policy that sampled              mu_logp_N
    r        pi_theta(o) / mu(o) of one token     exp(logp_N - mu_logp_N)
    P_n      (log r)^2

The default loss of prime-rl adds 1e-3 P; it names Kimi K2.5 as its source. P is twice the estimator k2 of the KL
divergence from mu (Schulman 2020), whose gradient on policy is that of the divergence.

Axes: N policy tokens of a micro-batch.
"""

from torch import Tensor

from shoal.algos.ratios import LOG_RATIO_LIMIT


def squared_ratio(logp_N: Tensor, mu_logp_N: Tensor) -> Tensor:
    """P_n of each token; beyond `LOG_RATIO_LIMIT` it is constant."""
    return (logp_N - mu_logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).square()

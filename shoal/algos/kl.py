"""The KL divergence of the policy from a reference: three estimators, as penalties in the loss or in the advantages.

Called by `train/objective` for each micro-batch, if the run asks for it. Pure: it uses no model, optimiser or batch beyond
its arguments. Source of the estimators: Schulman 2020, Approximating KL Divergence.

    symbol   meaning                                                argument
    pi       the policy that learns                                 logp_N
    rho      the reference                                          reference_logp_N
    x        log rho(o) - log pi(o) of one token
    k1       -x                  its mean under pi is the KL divergence
    k2       x^2 / 2             smaller variance, a little bias
    k3       e^x - 1 - x         no bias, and never negative: GRPO's penalty, arXiv:2402.03300, eq. 4

A good estimate of the divergence need not have its gradient (arXiv:2506.09477). Under pi, with the estimator in the loss,
the mean gradient of one token is

    k1       0: E[grad log pi] = 0, so this penalty does nothing but add noise
    k2       the gradient of KL(pi, rho)
    k3       the gradient of KL(rho, pi), the other way round; near it if pi is near rho

`weighted` multiplies the estimator by the importance ratio, through which gradient flows. Then k1 and k3 have the gradient
of KL(pi, rho) although another policy sampled, if the ratio is to that policy (k3: DeepSeek-V3.2, arXiv:2512.02556). All
of these take what was written before a token as given. `rest_of_penalty` is the gradient of the divergence between whole
rows: each token answers for the penalties of all that follow, as for a reward (RLHF's usual form, arXiv:2009.01325; RLOO,
arXiv:2402.14740).

Axes: N policy tokens of a micro-batch.
"""

from typing import Literal

from torch import Tensor

from shoal.algos.ratios import LOG_RATIO_LIMIT, row_rest

Estimator = Literal["k1", "k2", "k3"]


def kl_terms(logp_N: Tensor, reference_logp_N: Tensor, estimator: Estimator) -> Tensor:
    """The estimate at each token, nats. Beyond `LOG_RATIO_LIMIT` it is constant."""
    x_N = (reference_logp_N - logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return -x_N
        case "k2":
            return x_N.square() / 2
        case "k3":
            return x_N.expm1() - x_N


def rest_of_penalty(old_logp_N: Tensor, reference_logp_N: Tensor, row_N: Tensor) -> Tensor:
    """At each token, the sum of k1 from it to the end of its row, without a gradient: what an advantage loses, times beta.

    The tokens are those of the policy before the step (`old_logp_N`).
    """
    return row_rest(kl_terms(old_logp_N, reference_logp_N, "k1").detach(), row_N)

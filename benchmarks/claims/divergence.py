"""Claims about estimators of the KL divergence, as values and as losses, by enumeration.

Called by `exact`. What was written before a token is taken as given, unless a figure says that it is of whole rows.
"""

from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.claims.losses import NONE, pulled
from benchmarks.claims.tabular import WRITTEN_RT, Array, Policy, off, policy_of
from shoal.algos.losses import TokenLoss
from shoal.algos.regularisers import Estimator, kl_terms, rest_of_penalty


def divergence() -> dict[str, Any]:
    """k1, k2 and k3 (Schulman 2020) as values: k2 alone is biased. As a loss on the policy's own tokens (arXiv:2506.09477):
    k1 pulls nowhere, k2 as the KL to the reference, k3 as the KL from it; weighted by the ratio k1 and k3 as the KL to it.
    Taken from the advantages, k1 has the gradient of the KL of whole rows."""
    found: dict[str, Any] = {}
    holds = True
    for name, distance in (("near", 0.3), ("far", 1.0)):
        policy = policy_of(1)
        ref = Policy(policy.logits_SV + distance * policy_of(12).logits_SV)
        log_ratio_RT = policy.logp_RT - ref.logp_RT
        to_ref = -policy.pushed(log_ratio_RT)  # a loss is pulled down
        from_ref = policy.pushed(np.exp(-log_ratio_RT) * WRITTEN_RT)
        rows = -policy.gradient(log_ratio_RT.sum(1))
        figures: dict[str, Any] = {"kl_of_rows": policy.mean(log_ratio_RT.sum(1))}
        for estimator in get_args(Estimator):
            figures[estimator] = _estimator(policy, ref, estimator, to_ref, from_ref)
        rest_RT = np.zeros(WRITTEN_RT.shape)
        row_N = torch.from_numpy(np.nonzero(WRITTEN_RT)[0])
        at_N = [torch.from_numpy(one.logp_RT[WRITTEN_RT]) for one in (policy, ref)]
        rest_RT[WRITTEN_RT] = -rest_of_penalty(*at_N, row_N).numpy()
        figures["k1_in_advantages"] = {
            "beside_the_kl_of_rows": off(policy.pushed(rest_RT), rows),
            "variance": policy.spread(rest_RT),
        }
        found[name] = figures
        k1, k2, k3 = (figures[estimator] for estimator in get_args(Estimator))
        holds &= max(abs(k1["bias"]), abs(k3["bias"]), k1["length_of_the_gradient"]) < NONE < abs(k2["bias"])
        holds &= max(k2["beside_the_kl_to_it"], k3["beside_the_kl_from_it"]) < NONE
        holds &= max(k1["weighted_beside_the_kl_to_it"], k3["weighted_beside_the_kl_to_it"]) < NONE
        holds &= k1["variance"] > k3["variance"] if name == "near" else True
        holds &= figures["k1_in_advantages"]["beside_the_kl_of_rows"] < NONE
    return {**found, "holds": bool(holds)}


def _estimator(policy: Policy, ref: Policy, estimator: Estimator, to_ref: Array, from_ref: Array) -> dict[str, float]:
    """An estimator as a value of a whole row, and as a loss of its tokens."""
    ref_RT = torch.from_numpy(ref.logp_RT)
    value_RT = kl_terms(torch.from_numpy(policy.logp_RT), ref_RT, estimator).numpy() * WRITTEN_RT
    now_RT = torch.from_numpy(policy.logp_RT)

    def plain(logp: Tensor, weight: Tensor) -> TokenLoss:
        return TokenLoss(weight * kl_terms(logp, ref_RT, estimator), torch.zeros_like(logp, dtype=torch.bool))

    def weighted(logp: Tensor, weight: Tensor) -> TokenLoss:
        plainly = plain(logp, weight)
        return plainly._replace(loss_N=(logp - now_RT).exp() * plainly.loss_N)

    ones = np.ones(WRITTEN_RT.shape)
    c_RT, weighted_RT = (pulled(rule, policy.logp_RT, ones) for rule in (plain, weighted))
    kl, row_R = policy.mean((policy.logp_RT - ref.logp_RT).sum(1)), value_RT.sum(1)
    update, by_weight = policy.pushed(c_RT), policy.pushed(weighted_RT)
    return {
        "bias": policy.mean(row_R) - kl,
        "variance": policy.mean(np.square(row_R)) - policy.mean(row_R) ** 2,
        "length_of_the_gradient": float(np.linalg.norm(update)),
        "beside_the_kl_to_it": off(update, to_ref),
        "beside_the_kl_from_it": off(update, from_ref),
        "weighted_beside_the_kl_to_it": off(by_weight, to_ref),
        "variance_of_the_gradient": policy.spread(c_RT),
        "variance_of_the_weighted_gradient": policy.spread(weighted_RT),
    }

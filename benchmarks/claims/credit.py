"""Claims about credit, by enumeration: a critic with GAE, vines, and return-to-go, against the true gradient.

Called by `exact`. Bias is the relative distance of an expected update to the gradient; variance is that of one rollout's
update, summed over the parameters.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.claims.tabular import (
    LENGTH,
    LENGTHS_R,
    ROLLOUTS,
    STATES_RT,
    TOKENS_RT,
    WRITTEN_RT,
    Array,
    Policy,
    cosine,
    off,
    policy_of,
    right_ones,
)  # fmt: skip
from shoal.algos.advantages import returns_to_go, turn_advantages
from shoal.algos.gae import gae
from shoal.algos.vineppo import start_values, step_advantages, vine_values

LAMBDAS = (0.0, 0.5, 0.95, 1.0)
CONTINUATIONS = (1, 2, 4)
NONE = 1e-12
"""A bias below this is rounding."""


def critic() -> dict[str, Any]:
    """GAE (arXiv:1506.02438): with true values no lambda has a bias, and a smaller one has less variance. With wrong values
    only lambda = 1 has none."""
    policy, rewards_R = policy_of(1), right_ones()
    true_S = policy.values_S(rewards_R)
    wrong_S = true_S + np.random.default_rng(2).normal(scale=0.2, size=true_S.shape)
    wanted = policy.gradient(rewards_R)
    found: dict[str, Any] = {"lambda": list(LAMBDAS)}
    for name, V_S in (("true_values", true_S), ("wrong_values", wrong_S)):
        credits = [_by_gae(V_S, rewards_R, lam) for lam in LAMBDAS]
        found[name] = {
            "bias": [off(policy.pushed(c_RT), wanted) for c_RT in credits],
            "variance": [policy.spread(c_RT) for c_RT in credits],
        }
    variance, bias = found["true_values"]["variance"], found["wrong_values"]["bias"]
    found["holds"] = (
        max(found["true_values"]["bias"]) < NONE
        and variance == sorted(variance)
        and bias[-1] < NONE < 0.01 < min(bias[:-1])
        and bias == sorted(bias, reverse=True)
    )
    return found


def vines() -> dict[str, Any]:
    """VinePPO (arXiv:2410.01679): K continuations give no bias, and what they add to the variance of true values falls
    with 1 / K. A rollout's own return (lambda = 1) has more variance from some K on. For the start, the mean of a group's
    other rollouts gives no bias; that of the whole group turns the update away from the gradient."""
    policy, rewards_R = policy_of(1), right_ones()
    true_S, wanted = policy.values_S(rewards_R), policy.gradient(rewards_R)
    exact = policy.spread(_by_gae(true_S, rewards_R, 0.0))
    biases, variances = zip(*(_by_vines(policy, true_S, rewards_R, K, wanted) for K in CONTINUATIONS), strict=True)
    added = [variance - exact for variance in variances]
    others, whole = (_by_start(policy, true_S, rewards_R, of) for of in (start_values, lambda R_G: [sum(R_G) / 2] * 2))
    return {
        "continuations": list(CONTINUATIONS),
        "bias": list(biases),
        "variance": list(variances),
        "variance_of_true_values": exact,
        "variance_of_returns": policy.spread(_by_gae(true_S, rewards_R, 1.0)),
        "added_times_K": [K * one for K, one in zip(CONTINUATIONS, added, strict=True)],
        "start_of_two": {
            "bias_of_the_other": off(others, wanted),
            "bias_of_the_mean": off(whole, wanted),
            "cosine_of_the_mean": cosine(whole, wanted),
        },
        "holds": max(biases) < NONE
        and off(others, wanted) < NONE
        and cosine(whole, wanted) < 0.999
        and variances[-1] < policy.spread(_by_gae(true_S, rewards_R, 1.0))
        and max(off([K * one], [added[0]]) for K, one in zip(CONTINUATIONS, added, strict=True)) < NONE * 1e3,
    }


def turns() -> dict[str, Any]:
    """Return-to-go (Baxter and Bartlett 2001): the same expectation as the whole return with less variance; with the mean
    of a group of G as the baseline, (G - 1) / G of it."""
    policy = policy_of(3)
    rewards_SV = np.random.default_rng(4).random(policy.logp_SV.shape)
    rewards_RT = rewards_SV[STATES_RT, TOKENS_RT] * WRITTEN_RT
    wanted = policy.gradient(rewards_RT.sum(1))
    whole_RT = np.broadcast_to(rewards_RT.sum(1, keepdims=True), WRITTEN_RT.shape)
    to_go_RT = _for_each(lambda r: returns_to_go(rewards_RT[r, : LENGTHS_R[r]].tolist()))
    rollouts_MG, p_M = policy.groups(2)
    c_MGT = np.zeros((len(p_M), 2, LENGTH))
    for m, pair in enumerate(rollouts_MG):
        credits = turn_advantages([rewards_RT[r, : LENGTHS_R[r]].tolist() for r in pair])
        for g, credit in enumerate(credits):
            c_MGT[m, g, : len(credit)] = credit / 2
    mean_P, variance = policy.over_groups(c_MGT, rollouts_MG, p_M)
    figures = {
        "bias": off(policy.pushed(to_go_RT), wanted),
        "variance_of_whole_returns": policy.spread(whole_RT),
        "variance_of_returns_to_go": policy.spread(to_go_RT),
        "group_of_two": {
            "factor": float(mean_P @ wanted / (wanted @ wanted)),
            "bias_beside_the_factor": off(2.0 * mean_P, wanted),
            "variance_beside_the_factor": 4.0 * variance,
            "variance_of_two_returns_to_go": policy.spread(to_go_RT) / 2,
        },
    }
    pair = figures["group_of_two"]
    holds = figures["bias"] < NONE and pair["bias_beside_the_factor"] < 1e-6  # advantages are float32
    return {
        **figures,
        "holds": holds and figures["variance_of_returns_to_go"] < figures["variance_of_whole_returns"],
    }


def _for_each(credit: Callable[[int], Array]) -> Array:
    """The credit of every rollout's tokens, padded with 0."""
    c_RT = np.zeros(WRITTEN_RT.shape)
    for r, length in enumerate(LENGTHS_R):
        c_RT[r, :length] = credit(r)
    return c_RT


def _by_gae(V_S: Array, rewards_R: Array, lam: float) -> Array:
    def credit(r: int) -> Array:
        length = LENGTHS_R[r]
        return gae(V_S[STATES_RT[r, :length]].tolist(), [0.0] * (length - 1) + [rewards_R[r]], lam=lam).A_T

    return _for_each(credit)


def _by_vines(policy: Policy, true_S: Array, rewards_R: Array, K: int, wanted: Array) -> tuple[float, float]:
    """Bias and variance over the rollout and over every result of K continuations from each of its states. A continuation
    is right with the probability that is the state's value."""
    guesses = [vine_values([[1.0] * right + [0.0] * (K - right)])[0] for right in range(K + 1)]
    mean_P, squares = np.zeros_like(wanted), 0.0
    for r, rollout in enumerate(ROLLOUTS):
        values = true_S[STATES_RT[r, : len(rollout)]]
        rewards = [0.0] * (len(rollout) - 1) + [float(rewards_R[r])]
        for results in itertools.product(range(K + 1), repeat=len(rollout)):
            chances = [
                math.comb(K, right) * value**right * (1 - value) ** (K - right)
                for right, value in zip(results, values, strict=True)
            ]
            credit_T = step_advantages([guesses[right] or 0.0 for right in results], rewards)
            g_P = credit_T @ policy.scores_RTP[r, : len(rollout)]
            p = policy.p_R[r] * math.prod(chances)
            mean_P += p * g_P
            squares += p * float(g_P @ g_P)
    return off(mean_P, wanted), squares - float(mean_P @ mean_P)


def _by_start(policy: Policy, true_S: Array, rewards_R: Array, of: Callable[[list[float]], list[float]]) -> Array:
    """The expected update of a rollout of two, if `of` says from both returns what the start is worth to each, and the true
    values what later states are."""
    pairs_M2, p_M = policy.groups(2)
    mean_P = np.zeros(policy.scores_RTP.shape[2])
    for pair, p in zip(pairs_M2, p_M, strict=True):
        starts = of(rewards_R[pair].tolist())
        for r, start in zip(pair, starts, strict=True):
            length = LENGTHS_R[r]
            values = [start, *true_S[STATES_RT[r, 1:length]]]
            credit_T = step_advantages(values, [0.0] * (length - 1) + [float(rewards_R[r])])
            mean_P += p / 2 * (credit_T @ policy.scores_RTP[r, :length])
    return mean_P

"""Claims about preferences, selection and teachers, by enumeration.

Called by `exact`. Every pair of answers, every group, and every token of every rollout is counted with its probability.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.claims.tabular import (
    LENGTHS_R,
    ROLLOUTS,
    STATES_RT,
    TOKENS_RT,
    WRITTEN_RT,
    Array,
    cosine,
    off,
    policy_of,
    policy_with,
    rewards_by,
    right_ones,
)  # fmt: skip
from shoal.algos.advantages import returns_to_go
from shoal.algos.preferences import bradley_terry_loss, distillation_advantages, dpo_loss, reverse_kl
from shoal.algos.rejection_sampling import raft, star

BETA = 0.3
NONE = 1e-10


def preferences() -> dict[str, Any]:
    """DPO (arXiv:2305.18290): if people prefer by Bradley and Terry, the policy that RL with a KL to the reference would
    reach has gradient 0. A reward model of the true rewards has, too, whatever is added to all of them."""
    ref, rewards_R = policy_of(5), rewards_by(6)
    tilted_R = ref.p_R * np.exp(rewards_R / BETA)
    best = policy_with(tilted_R / tilted_R.sum())
    true_R, ref_R = torch.from_numpy(rewards_R), torch.from_numpy(ref.logp_R)

    def of_policy(logp_R: Array) -> float:
        def loss(won: Pair, lost: Pair) -> Tensor:
            return dpo_loss(won.values, lost.values, ref_R[won.at], ref_R[lost.at], beta=BETA, num_pairs=1).loss

        return _norm_of_expected(loss, torch.from_numpy(logp_R), true_R, torch.from_numpy(ref.p_R))

    def of_scores(scores_R: Tensor) -> float:
        def loss(won: Pair, lost: Pair) -> Tensor:
            return bradley_terry_loss(won.values, lost.values, num_pairs=1)

        return _norm_of_expected(loss, scores_R, true_R, torch.from_numpy(ref.p_R))

    kl_R = best.logp_R - ref.logp_R
    by_rl = best.gradient(rewards_R - BETA * kl_R)
    found = {
        "dpo_gradient_at_the_best": of_policy(best.logp_R),
        "dpo_gradient_at_the_reference": of_policy(ref.logp_R),
        "rl_gradient_at_the_best": float(np.linalg.norm(by_rl)),
        "reward_of_best": best.mean(rewards_R),
        "reward_of_reference": ref.mean(rewards_R),
        "reward_model_gradient_at_the_truth": of_scores(true_R),
        "reward_model_gradient_at_the_truth_plus_7": of_scores(true_R + 7.0),
        "reward_model_gradient_at_zero": of_scores(torch.zeros_like(true_R)),
    }
    zero = (
        "dpo_gradient_at_the_best", "rl_gradient_at_the_best", "reward_model_gradient_at_the_truth",
        "reward_model_gradient_at_the_truth_plus_7",
    )  # fmt: skip
    other = ("dpo_gradient_at_the_reference", "reward_model_gradient_at_zero")
    return {**found, "holds": max(found[name] for name in zero) < NONE < 1e-3 < min(found[name] for name in other)}


class Pair(NamedTuple):
    """One side of all ordered pairs of rollouts."""

    values: Tensor
    """What is learned of each answer."""
    at: Tensor
    """Which rollout it is."""


def _norm_of_expected(loss: Callable[[Pair, Pair], Tensor], values_R: Tensor, true_R: Tensor, p_R: Tensor) -> float:
    """Norm of the expected gradient by what is learned of every rollout, over all pairs and both results of each."""
    count = len(values_R)
    won_at, lost_at = (torch.from_numpy(index.flatten()) for index in np.indices((count, count)))
    won, lost = (Pair(values_R[at].requires_grad_(), at) for at in (won_at, lost_at))
    chance_B = p_R[won_at] * p_R[lost_at] * torch.sigmoid(true_R[won_at] - true_R[lost_at])
    up_B, down_B = torch.autograd.grad(loss(won, lost), (won.values, lost.values))  # a sum over pairs
    total_R = torch.zeros_like(values_R).index_add(0, won_at, chance_B * up_B).index_add(0, lost_at, chance_B * down_B)
    return float(total_R.norm())


def selection() -> dict[str, Any]:
    """Imitating what STaR (arXiv:2203.14465) keeps follows the gradient of the solve rate p; what RAFT
    (arXiv:2304.06767) keeps of groups of two, 2 (1 - p) times it: hard tasks count more."""
    policy, rewards_R = policy_of(1), right_ones()
    wanted, p = policy.gradient(rewards_R), policy.mean(rewards_R)
    rollouts_MG, p_M = policy.groups(2)
    updates = {}
    for name, rule in (("star", star), ("raft", raft)):
        c_MGT = np.zeros((len(p_M), 2, WRITTEN_RT.shape[1]))
        for m, group in enumerate(rollouts_MG):
            c_MGT[m, rule(rewards_R[group].tolist())] = 1.0
        updates[name] = policy.over_groups(c_MGT, rollouts_MG, p_M)[0]
    factors = {name: float(update @ wanted / (wanted @ wanted)) for name, update in updates.items()}
    return {
        "solve_rate": p,
        "factors": factors,
        "cosines": {name: cosine(update, wanted) for name, update in updates.items()},
        "holds": off(updates["star"], 2.0 * wanted) < NONE and off(updates["raft"], 2.0 * (1.0 - p) * wanted) < NONE,
    }


def distillation() -> dict[str, Any]:
    """On-policy distillation (arXiv:2306.13649): the written token's credit has the gradient of the whole distribution.
    Neither credits what a token does to later states; returns-to-go of the tokens' credit do, and have the gradient of the
    reverse KL of whole answers."""
    student, teacher = policy_of(9), policy_of(10)
    logits_SV = torch.from_numpy(student.logits_SV).requires_grad_()
    logp_NV = torch.log_softmax(logits_SV, -1)[torch.from_numpy(STATES_RT[WRITTEN_RT])]
    teacher_NV = torch.from_numpy(teacher.logp_SV)[torch.from_numpy(STATES_RT[WRITTEN_RT])]
    weight_N = torch.from_numpy(np.repeat(student.p_R, LENGTHS_R))
    loss = reverse_kl(logp_NV, teacher_NV, weight_N, num_tokens=1)
    whole = -torch.autograd.grad(loss, logits_SV)[0].flatten().numpy()
    A_RT = np.zeros(WRITTEN_RT.shape)
    at = STATES_RT[WRITTEN_RT], TOKENS_RT[WRITTEN_RT]
    A_RT[WRITTEN_RT] = distillation_advantages(
        torch.from_numpy(student.logp_SV[at]), torch.from_numpy(teacher.logp_SV[at])
    ).numpy()
    written = student.pushed(A_RT)
    answers = student.gradient(teacher.logp_R - student.logp_R)
    to_go_RT = np.zeros(WRITTEN_RT.shape)
    for r, length in enumerate(LENGTHS_R):
        to_go_RT[r, :length] = returns_to_go(A_RT[r, :length].tolist())
    found = {
        "written_token_beside_whole_distribution": off(written, whole),
        "cosine_to_the_kl_of_answers": cosine(written, answers),
        "returns_to_go_beside_the_kl_of_answers": off(student.pushed(to_go_RT), answers),
        "variance_of_the_written_token": student.spread(A_RT),
        "variance_of_returns_to_go": student.spread(to_go_RT),
        "variance_of_the_whole_distribution": _spread_of_states(student.p_R, student.logp_SV, teacher.logp_SV),
    }
    exact = max(found["written_token_beside_whole_distribution"], found["returns_to_go_beside_the_kl_of_answers"])
    return {
        **found,
        "holds": exact < NONE and found["variance_of_the_whole_distribution"] < found["variance_of_the_written_token"],
    }


def _spread_of_states(p_R: Array, logp_SV: Array, teacher_SV: Array) -> float:
    """Variance of an update by the whole distribution: only the states that a rollout meets are drawn."""
    p_SV = np.exp(logp_SV)
    A_SV = teacher_SV - logp_SV
    pull_SV = p_SV * (A_SV - (p_SV * A_SV).sum(1, keepdims=True))
    met_RS = np.zeros((len(ROLLOUTS), len(logp_SV)))
    for r, t in itertools.product(range(len(ROLLOUTS)), range(WRITTEN_RT.shape[1])):
        met_RS[r, STATES_RT[r, t]] += WRITTEN_RT[r, t]
    g_RP = (met_RS[:, :, None] * pull_SV).reshape(len(ROLLOUTS), -1)
    return float(p_R @ np.square(g_RP).sum(1) - np.square(p_R @ g_RP).sum())

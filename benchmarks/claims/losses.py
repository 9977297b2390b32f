"""Claims about policy losses and baselines, by enumeration.

Called by `exact`. A loss is asked for its gradient by each token's log-probability; the policy's table does the rest. Only
advantages are float32, as in a run: that is what the bars of 1e-6 are for.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.claims.tabular import (
    END,
    LENGTH,
    LENGTHS_R,
    ROLLOUTS,
    STATES,
    WRITTEN_RT,
    Array,
    Policy,
    cosine,
    off,
    policy_of,
    right_ones,
)
from shoal.algos import advantages
from shoal.algos.loss_averaging import Average, token_weights
from shoal.algos.losses import TokenLoss, cispo_loss, ppo_loss, reinforce_loss

NONE = 1e-12
ROUNDED = 1e-6
GROUP = 3
AVERAGES: tuple[Average, ...] = get_args(Average)
STEPS = (2.0, 4.0, 6.0, 8.0)
"""Lengths of a step along the true gradient, in its own units."""
RARE = 0.2
"""A token with a lower probability is rare."""

Rule = Callable[[Tensor, Tensor, Tensor], TokenLoss]

BOUNDS: dict[str, Rule] = {
    "none": lambda logp, old, A: ppo_loss(logp, old, A, eps_low=1.0, eps_high=math.inf),
    "clip": lambda logp, old, A: ppo_loss(logp, old, A, eps_low=0.2, eps_high=0.2),
    "clip_higher": lambda logp, old, A: ppo_loss(logp, old, A, eps_low=0.2, eps_high=0.28),
    "cispo": lambda logp, old, A: cispo_loss(logp, old, A, least=0.0, most=5.0),
}
"""Of a token, given its log-probability now and when it was sampled, and its advantage."""


def length_drift() -> dict[str, Any]:
    """Dr. GRPO (arXiv:2503.20783): where length and reward are independent, a constant divisor leaves lengths as they are.
    The mean over each rollout makes right answers shorter and wrong ones longer."""
    policy = _of_independent_lengths()
    rewards_R = np.array([float(rollout[0] == 0) for rollout in ROLLOUTS])
    rollouts_MG, p_M = policy.groups(GROUP)
    A_MG = np.array([_centred(tuple(rewards_R[group])) for group in rollouts_MG])
    c_MGT = pulled(lambda logp, A: reinforce_loss(logp, A), policy.logp_RT[rollouts_MG], A_MG[..., None])
    found: dict[str, Any] = {"right": {}, "wrong": {}}
    for average in AVERAGES:
        weight_MG = np.array([_weights(tuple(LENGTHS_R[group].tolist()), average) for group in rollouts_MG])
        update_P, _ = policy.over_groups(c_MGT * weight_MG[..., None], rollouts_MG, p_M)
        for kind, chosen_R in (("right", rewards_R), ("wrong", 1.0 - rewards_R)):
            found[kind][average] = float(_of_mean_length(policy, chosen_R) @ update_P)
    still = max(abs(found[kind]["constant"]) for kind in ("right", "wrong"))
    return {
        **found,
        "holds": still < ROUNDED and found["right"]["rollouts"] < -ROUNDED < ROUNDED < found["wrong"]["rollouts"],
    }


def baselines() -> dict[str, Any]:
    """RLOO (arXiv:2402.14740) has no bias; with the group's own mean as the baseline, as in GRPO without the deviation, the
    same update is (G - 1) / G as long. MaxRL (arXiv:2602.02710) multiplies the gradient by (1 - (1 - p)^(G - 1)) / p."""
    policy, rewards_R = policy_of(1), right_ones()
    wanted, p = policy.gradient(rewards_R), policy.mean(rewards_R)
    credits: dict[str, Callable[[Sequence[float]], Any]] = {
        "reward": lambda rewards: np.asarray(rewards),
        "mean": lambda rewards: advantages.group_advantages(rewards, "mean"),
        "mean_std": lambda rewards: advantages.group_advantages(rewards, "mean_std"),
        "rloo": advantages.rloo_advantages,
        "maxrl": advantages.maxrl_advantages,
    }
    found: dict[str, Any] = {"solve_rate": p}
    holds = True
    for G in (2, 3):
        rollouts_MG, p_M = policy.groups(G)
        figures: dict[str, dict[str, float]] = {}
        for name, credit in credits.items():
            known = {
                rewards: credit(rewards) for rewards in {tuple(rewards_R[group].tolist()) for group in rollouts_MG}
            }
            A_MG = np.array([known[tuple(rewards_R[group].tolist())] for group in rollouts_MG], np.float64)
            c_MGT = np.repeat(A_MG[..., None], LENGTH, axis=2) / G
            update_P, variance = policy.over_groups(c_MGT, rollouts_MG, p_M)
            factor = float(update_P @ wanted / (wanted @ wanted))
            figures[name] = {
                "factor": factor,
                "bias": off(update_P, wanted),
                "bias_beside_the_factor": off(update_P / factor, wanted),
                "variance_beside_the_factor": variance / factor**2,
            }
        expected = {"reward": 1.0, "mean": (G - 1) / G, "rloo": 1.0, "maxrl": (1 - (1 - p) ** (G - 1)) / p}
        holds &= all(abs(figures[name]["factor"] - factor) < ROUNDED for name, factor in expected.items())
        holds &= max(one["bias_beside_the_factor"] for one in figures.values()) < ROUNDED
        same = [figures[name]["variance_beside_the_factor"] for name in ("mean", "rloo")]
        holds &= off(same[:1], same[1:]) < ROUNDED
        found[f"groups_of_{G}"] = figures
    return {**found, "holds": bool(holds)}


def clipping() -> dict[str, Any]:
    """As the policy leaves the one that sampled, PPO's clip takes gradient away, most of it from rare tokens that should
    rise; clip-higher (arXiv:2503.14476) leaves more of it, and CISPO (arXiv:2506.13585) all."""
    found: dict[str, Any] = {"steps": list(STEPS), "highest_probability_from_0.01": _highest()}
    for rule in ("clip", "clip_higher", "cispo"):
        measured = [_kept(rule, step) for step in STEPS]
        found[rule] = {name: [one[name] for one in measured] for name in measured[0]}
    clip, higher, cispo = (found[rule] for rule in ("clip", "clip_higher", "cispo"))
    highest = found["highest_probability_from_0.01"]
    rare = list(zip(clip["rising_and_rare"], higher["rising_and_rare"], strict=True))
    of_all = list(zip(clip["rising"], clip["rising_and_rare"], strict=True))
    holds = (
        all(low <= high for low, high in rare)
        and any(low < high for low, high in rare)
        and all(rising > rarely for rising, rarely in of_all if rising < 1.0 - NONE)
        and clip["falling"] == higher["falling"]
        and max(abs(1.0 - kept) for name in ("rising", "rising_and_rare", "falling") for kept in cispo[name]) < NONE
        and max(abs(highest["clip"] - 0.012), abs(highest["clip_higher"] - 0.0128)) < 1e-5
    )
    return {**found, "holds": holds}


def _kept(name: str, step: float) -> dict[str, float]:
    """What a rule leaves of the gradient, by kind of token, after a step away from the policy that sampled; and the angle
    between its update, from that policy's rollouts, and the true gradient."""
    old, rewards_R = policy_of(11), right_ones()
    new = Policy(old.logits_SV + step * old.gradient(rewards_R).reshape(old.logits_SV.shape))
    A_RT = np.broadcast_to((rewards_R - old.mean(rewards_R))[:, None], WRITTEN_RT.shape)
    old_RT = torch.from_numpy(old.logp_RT)
    c_RT = pulled(lambda logp, A: BOUNDS[name](logp, old_RT, A), new.logp_RT, A_RT)
    free_RT = pulled(lambda logp, A: BOUNDS["none"](logp, old_RT, A), new.logp_RT, A_RT)
    rising = WRITTEN_RT & (A_RT > 0)
    rare = rising & (np.exp(old.logp_RT) < RARE)
    places = {"rising": rising, "rising_and_rare": rare, "falling": WRITTEN_RT & (A_RT < 0)}
    weight_RT = np.broadcast_to(old.p_R[:, None], WRITTEN_RT.shape)
    kept = {
        at: float((weight_RT * abs(c_RT))[place].sum() / (weight_RT * abs(free_RT))[place].sum())
        for at, place in places.items()
    }
    update = np.einsum("r,rt,rtp->p", old.p_R, c_RT, new.scores_RTP)
    return {**kept, "cosine_to_the_gradient": cosine(update, new.gradient(rewards_R))}


def _highest() -> dict[str, float]:
    """The highest probability, of those from 0.01 to 1, up to which a token that should rise from 0.01 has a gradient."""
    logp_N = np.log(np.linspace(0.01, 0.9999, 98_991))
    old_N = torch.full((len(logp_N),), math.log(0.01), dtype=torch.float64)
    found = {}
    for name in ("clip", "clip_higher", "cispo"):
        c_N = pulled(lambda logp, A, name=name: BOUNDS[name](logp, old_N, A), logp_N, np.ones(len(logp_N)))
        found[name] = float(np.exp(logp_N[c_N != 0].max()))
    return found


def pulled(loss: Callable[[Tensor, Tensor], TokenLoss], logp: Array, A: Array) -> Array:
    """How much each token's score counts: minus the gradient of a loss by its log-probability; 0 where there is none."""
    asked = torch.from_numpy(logp).requires_grad_()
    A_N = torch.from_numpy(np.array(np.broadcast_to(A, logp.shape)))
    (grad,) = torch.autograd.grad(loss(asked, A_N).loss_N.sum(), asked)
    found: Array = -grad.numpy() * (logp != 0.0)
    return found


@cache
def _centred(rewards: tuple[float, ...]) -> Array:
    return advantages.group_advantages(rewards, "mean").astype(np.float64)


@cache
def _weights(lengths: tuple[int, ...], average: Average) -> Array:
    """Weight of a token of each rollout of a batch of one group."""
    found = token_weights(lengths, range(len(lengths)), [0] * len(lengths), average=average, L=LENGTH)
    return found / sum(lengths)


def _of_independent_lengths() -> Policy:
    """Writes a or b first, then letters alike in each state, and ends with a chance that only the length so far decides."""
    logits_SV = np.zeros((len(STATES), 3))
    logits_SV[0] = (math.log(0.4), math.log(0.6), -40.0)
    for state, text in enumerate(STATES[1:], 1):
        logits_SV[state, END] = (0.0, 0.5, -0.3, 0.8)[len(text)]
    return Policy(logits_SV)


def _of_mean_length(policy: Policy, chosen_R: Array) -> Array:
    """The gradient of the mean length of these rollouts."""
    share = policy.mean(chosen_R)
    mean = policy.mean(chosen_R * LENGTHS_R) / share
    return policy.gradient(chosen_R * (LENGTHS_R - mean) / share)

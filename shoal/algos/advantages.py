"""Advantages of a group's rollouts: GRPO, RLOO, MaxRL, returns to go, process rewards, and the spread of a batch."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# --- The numpy half of GRPO ---


STD_FLOOR = 1e-6
"""Added to the standard deviation, in units of reward: almost equal rewards must not give huge advantages."""


def group_advantages(rewards_G: Sequence[float], method: Literal["mean", "mean_std"]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once.

    "mean": A_i = R_i - mean(R), as in Dr. GRPO (arXiv:2503.20783): dividing by the deviation gives most weight to tasks
    that are nearly solved or nearly hopeless. "mean_std": the paper's A_i = (R_i - mean(R)) / (std(R) + 1e-6), with the
    sample deviation (ddof = 1), as in INTELLECT-2.
    """
    R_G = np.asarray(rewards_G, dtype=np.float64)
    A_G = R_G - R_G.mean()
    if method == "mean_std":
        A_G = A_G / (R_G.std(ddof=1) + STD_FLOOR)
    return A_G.astype(np.float32)


def rewards_differ(rewards_G: Sequence[float]) -> bool:
    """Whether the rewards differ at all: a group in which they do not has advantage 0 everywhere and teaches nothing.

    This compares the rewards, not their deviation: after rounding, equal rewards such as 0.1 have a deviation of 1e-17.
    """
    return min(rewards_G) < max(rewards_G)


# --- RLOO's advantages ---


def rloo_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once. A group has at least two rollouts."""
    R_G = np.asarray(rewards_G, dtype=np.float64)
    return (R_G - (R_G.sum() - R_G) / (len(R_G) - 1)).astype(np.float32)


# --- MaxRL's advantages ---


def maxrl_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once; 0 if the mean is not positive."""
    R_G = np.asarray(rewards_G, dtype=np.float64)
    mean = R_G.mean()
    return ((R_G - mean) / mean if mean > 0 else np.zeros_like(R_G)).astype(np.float32)


def maxrl_has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether any advantage differs from 0."""
    return min(rewards_G) < max(rewards_G) and bool(np.mean(rewards_G) > 0)


# --- Return-to-go over turns ---


def returns_to_go(rewards_S: Sequence[float], gamma: float = 1.0) -> NDArray[np.float64]:
    """G of each turn."""
    found, following = np.empty(len(rewards_S)), 0.0
    for s in reversed(range(len(rewards_S))):
        following = rewards_S[s] + gamma * following
        found[s] = following
    return found


def turn_advantages(rewards_G_S: Sequence[Sequence[float]], gamma: float = 1.0) -> list[NDArray[np.float32]]:
    """A of each turn of each rollout, computed in float64 and rounded once."""
    returns = [returns_to_go(rewards_S, gamma) for rewards_S in rewards_G_S]
    longest = max(map(len, returns), default=0)
    total_S = np.zeros(longest)
    for one in returns:
        total_S[: len(one)] += one
    return [(one - total_S[: len(one)] / len(returns)).astype(np.float32) for one in returns]


def returns_differ(rewards_G_S: Sequence[Sequence[float]], gamma: float = 1.0) -> bool:
    """Whether some turn's returns differ: this compares them, because equal ones may differ from their mean by rounding."""
    returns = [returns_to_go(rewards_S, gamma).tolist() for rewards_S in rewards_G_S]
    longest = max(map(len, returns), default=0)
    return len({tuple(one + [0.0] * (longest - len(one))) for one in returns}) > 1


# --- Rewards for each step of an answer ---


def process_advantages(
    rewards_G_S: Sequence[Sequence[float]], method: Literal["mean", "mean_std"] = "mean"
) -> list[NDArray[np.float32]]:
    """A of each step of each rollout, computed in float64 and rounded once. A rollout may have no steps."""
    steps = [np.asarray(rewards_S, dtype=np.float64) for rewards_S in rewards_G_S]
    R = np.concatenate([np.empty(0), *steps])
    if not R.size:
        return [np.empty(0, np.float32) for _ in steps]
    scale = R.std(ddof=1) + STD_FLOOR if method == "mean_std" and R.size > 1 else 1.0
    return [np.cumsum(((r_S - R.mean()) / scale)[::-1])[::-1].astype(np.float32) for r_S in steps]


def step_rewards_differ(rewards_G_S: Sequence[Sequence[float]]) -> bool:
    """Whether any two steps of the group have different rewards: otherwise no step is worth more than another."""
    return len({reward for rewards_S in rewards_G_S for reward in rewards_S}) > 1


# --- Advantages in units of their deviation over the batch ---


def batch_scale(A_I: NDArray[np.float64]) -> float:
    """What each advantage of the batch is multiplied by: 1 if all are equal, as when a batch has only one rollout left."""
    std = float(A_I.std())
    return 1 / (std + STD_FLOOR) if std > STD_FLOOR else 1.0  # guard: equal-advantages-keep-their-size

"""Advantages: GRPO, RLOO, MaxRL, returns to go, process rewards, GAE, VinePPO, and the spread of a batch.

numpy alone, so that the coordinator may import it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# --- The numpy half of GRPO ---
#
# How much better than its siblings each rollout of a group did, and whether any did.
#
#       symbol   meaning                                       where
#       R_i      reward of rollout i of the group              DeepSeekMath, arXiv:2402.03300, section 4.1.2
#       A_i      its advantage, the same for all its tokens
#       G        rollouts of the group
#
# Axes: G rollouts of one group.


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
#
# The reward of a rollout minus the mean of the others (arXiv:2402.14740, section 3; Kool et al. 2019).
#
#       symbol   meaning                                                        argument
#       R_i      reward of rollout i of the group                               rewards_G
#       A_i      R_i - 1/(G - 1) sum_{j != i} R_j  =  G/(G - 1) (R_i - mean(R))
#
# The baseline of a rollout leaves that rollout out, so the estimate of the gradient has no bias. With the mean of the
# whole group it is (G - 1)/G times as long.
#
# Axes: G rollouts of one group.


def rloo_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once. A group has at least two rollouts."""
    R_G = np.asarray(rewards_G, dtype=np.float64)
    return (R_G - (R_G.sum() - R_G) / (len(R_G) - 1)).astype(np.float32)


# --- MaxRL's advantages ---
#
# They make the policy gradient one of the log-likelihood of success (arXiv:2602.02710).
#
#       symbol   meaning                                           argument
#       R_i      1 if rollout i of the group succeeded, else 0     rewards_G
#       p        probability of success of one task
#       A_i      (R_i - mean(R)) / mean(R)
#
# The policy gradient is that of the sum of p over tasks, so easy tasks count as much as hard ones. The gradient of log p
# is 1/p times as large, which gives most weight to tasks that are seldom solved. With the group's mean in the place of p,
# the estimate approximates the gradient of log p the better, the larger the group is.
#
# Changed from the paper: rewards may be any numbers from 0 on. A group whose mean is not positive teaches nothing.
#
# Axes: G rollouts of one group.


def maxrl_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """A_i of every rollout, float32[G], computed in float64 and rounded once; 0 if the mean is not positive."""
    R_G = np.asarray(rewards_G, dtype=np.float64)
    mean = R_G.mean()
    return ((R_G - mean) / mean if mean > 0 else np.zeros_like(R_G)).astype(np.float32)


def maxrl_has_signal(rewards_G: Sequence[float]) -> bool:
    """Whether any advantage differs from 0."""
    return min(rewards_G) < max(rewards_G) and bool(np.mean(rewards_G) > 0)


# --- Return-to-go over turns ---
#
# A turn is credited with what came after it, not with what came before (G(PO)MDP, Baxter and Bartlett 2001, J. Artif.
# Intell. Res. 15).
#
#       symbol    meaning                                                                    argument
#       r_i^s     reward that turn s of rollout i earns; the last turn earns the score, too  rewards_G_S
#       gamma     discount of a turn; 1 counts later turns in full                           gamma
#       G_i^s     sum of gamma^(k - s) r_i^k over the turns k >= s
#       A_i^s     G_i^s - (1 / n) sum_j G_j^s: of every token of the turn
#
# A reward that was earned before a turn does not depend on it, so leaving it out keeps the gradient's expectation and
# takes away variance. The baseline of a turn is the mean over all n rollouts of the group; one that has ended before has
# earned nothing more, so its G is 0 there. With one turn in each rollout this is the advantage of `advantages`.
#
# Changed from the paper: the baseline is the group's, which includes the rollout itself, so the expected gradient is (n -
# 1) / n times the true one, as in GRPO.
#
# Axes: G rollouts of one group; S turns of a rollout, which differ in number.


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
#
# GRPO with process supervision, from DeepSeekMath (arXiv:2402.03300, section 4.1.3).
#
#       symbol       meaning                                                                   argument
#       r_i^j        reward of step j of rollout i                                             rewards_G_S
#       R            all step rewards of the group, one list
#       r~_i^j       (r_i^j - mean(R)) / std(R)
#       A_i^j        sum of r~_i^k over the steps k >= j: the advantage of every token of step j
#
# The mean is over steps, so a rollout of many average steps counts as much as one of a few: the number of steps earns
# nothing. With one step in each rollout this is the outcome's advantage of `advantages`.
#
# Changed from the paper: the deviation is left out unless asked for, as in Dr. GRPO (arXiv:2503.20783), and is the
# sample's (ddof = 1) with the floor of `advantages`.
#
# Axes: G rollouts of one group; S steps of a rollout, which differ in number.


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
#
# ScaleRL (arXiv:2510.13786) and REINFORCE++ (arXiv:2501.03262).
#
#       symbol   meaning                                                   argument
#       A_i      advantage of rollout i of the batch; with a critic, a
#                teacher or continuations, of token i                      A_I
#       A'_i     A_i / (std(A) + 1e-6), with the deviation of all I        A_i times the result
#
# Dividing by the deviation of the group instead (GRPO) gives most weight to tasks that are nearly solved or nearly
# hopeless. The batch's is the same for all tasks, so it changes only the size of the step. The mean is not subtracted:
# advantages already have a baseline.
#
# Axes: I rollouts of a batch, or tokens.


def batch_scale(A_I: NDArray[np.float64]) -> float:
    """What each advantage of the batch is multiplied by: 1 if all are equal, as when a batch has only one rollout left."""
    std = float(A_I.std())
    return 1 / (std + STD_FLOOR) if std > STD_FLOOR else 1.0  # guard: equal-advantages-keep-their-size


# --- Generalised advantage estimation (arXiv:1506.02438) over the tokens of one rollout, from a critic's values ---
#
#     symbol     meaning                                                                         argument
#     V(s_t)     value of the state before token t is written                                    values_T
#     r_t        reward that token t earns; in most runs only the last one earns any             rewards_T
#     gamma      discount of a token; 1 in language models, whose episodes end                   gamma
#     lambda     0: trust the critic after one token; 1: wait for the rewards, as REINFORCE      lam
#     delta_t    r_t + gamma V(s_t+1) - V(s_t);  V after the last token is 0                     equation 12
#     A_t        sum_l (gamma lambda)^l delta_t+l                                                equation 16
#     R_t        A_t + V(s_t): what the critic should have said (TD(lambda))                     what `value_loss` takes
#
# With the true values every lambda has the gradient's expectation, and less variance the smaller lambda is. With a wrong
# critic only lambda = 1 keeps that expectation (`docs/design/results-claims.md`).
#
# Changed from the paper: the state after the last token has value 0 also where a token limit ended the rollout, because
# its reward is final. The environment's tokens are no steps: the state before the policy's next token follows the one
# before.
#
# Axes: T tokens that the policy wrote in one rollout.


class Estimate(NamedTuple):
    """Credit of each token, and the critic's targets."""

    A_T: NDArray[np.float64]
    R_T: NDArray[np.float64]


def gae(values_T: Sequence[float], rewards_T: Sequence[float], *, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """A_t and R_t of each token. Raises ValueError if there is not one reward for each value."""
    V_T = np.asarray(values_T, dtype=np.float64)
    r_T = np.asarray(rewards_T, dtype=np.float64)
    if V_T.shape != r_T.shape:
        raise ValueError(f"{V_T.size} values but {r_T.size} rewards: give one of each for every token")
    delta_T = r_T + gamma * np.append(V_T[1:], 0.0) - V_T
    A_T, following = np.empty_like(delta_T), 0.0
    for t in reversed(range(len(delta_T))):
        following = delta_T[t] + gamma * lam * following
        A_T[t] = following
    return Estimate(A_T, A_T + V_T)


# --- VinePPO (arXiv:2410.01679): the value of a state is the mean reward of fresh continuations ---
#
#     symbol      meaning                                                                        argument
#     s_k         state at the start of step k of a rollout, such as a line of reasoning
#     K           continuations that the policy that sampled the rollout writes from one state
#     V(s_k)      mean return of these continuations: `vine_values`                              values_S
#     r_k         reward that step k itself earns; in most runs only the last one earns any      rewards_S
#     A_k         r_k + V(s_k+1) - V(s_k), the same for all tokens of the step; V after the end is 0
#
# V is unbiased for any K, so the gradient is, too; its variance falls with 1 / K. The start s_0 needs no continuations of
# its own: the other rollouts of the group are continuations from it (`start_values`). A rollout's own return must not be
# among them. With the mean of the whole group, the gradient of first steps would be (G - 1)/G as long, and that of later
# steps as long as it should be: another direction, not only another length as with GRPO's baseline.
#
# Changed from the paper: no discount, because its gamma is 1. Where a step's continuations are missing, `fill_values`
# takes the value of the nearest known state before it, so the credit of the steps in between goes to the step that
# reaches the next known state. This is a rule over what is logged, never over what happened to arrive.
#
# Axes: G rollouts of a group; S steps of one rollout; K continuations of one state; T tokens of the policy.


def start_values(returns_G: Sequence[float]) -> list[float]:
    """V(s_0) as each rollout of a group sees it: the mean return of the others. A group has at least two rollouts."""
    R_G = np.asarray(returns_G, dtype=np.float64)
    values_G: list[float] = ((R_G.sum() - R_G) / (len(R_G) - 1)).tolist()
    return values_G


def vine_values(returns_S_K: Sequence[Sequence[float]]) -> list[float | None]:
    """V of each step's first state; None where no continuation is known. Steps may have different numbers of them."""
    return [float(np.mean(np.asarray(returns_K, np.float64))) if len(returns_K) else None for returns_K in returns_S_K]


def fill_values(values_S: Sequence[float | None]) -> NDArray[np.float64]:
    """The values with those that are unknown taken from the nearest known state before. Raises ValueError if the first,
    which the group itself gives, is unknown."""
    if not values_S or values_S[0] is None:
        raise ValueError("the value of the first state is unknown: give the mean reward of the group's other rollouts")
    filled, known = np.empty(len(values_S)), values_S[0]
    for k, value in enumerate(values_S):
        known = known if value is None else value
        filled[k] = known
    return filled


def step_advantages(values_S: Sequence[float], rewards_S: Sequence[float]) -> NDArray[np.float64]:
    """A_k of each step. Raises ValueError if there is not one reward for each value."""
    V_S = np.asarray(values_S, dtype=np.float64)
    r_S = np.asarray(rewards_S, dtype=np.float64)
    if V_S.shape != r_S.shape:
        raise ValueError(f"{V_S.size} values but {r_S.size} rewards: give one of each for every step")
    return r_S + np.append(V_S[1:], 0.0) - V_S


def of_tokens(advantages_S: Sequence[float], lengths_S: Sequence[int]) -> NDArray[np.float64]:
    """The advantage of each token, [T], given how many tokens each step has."""
    return np.repeat(np.asarray(advantages_S, dtype=np.float64), lengths_S)

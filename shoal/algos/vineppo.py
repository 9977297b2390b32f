"""VinePPO (arXiv:2410.01679): the value of a state is the mean reward of fresh continuations, not a critic's guess.

numpy alone. It does not ask for any, nor know who made them.

    symbol      meaning                                                                        argument
    s_k         state at the start of step k of a rollout, such as a line of reasoning
    K           continuations that the policy that sampled the rollout writes from one state
    V(s_k)      mean return of these continuations: `vine_values`                              values_S
    r_k         reward that step k itself earns; in most runs only the last one earns any      rewards_S
    A_k         r_k + V(s_k+1) - V(s_k), the same for all tokens of the step; V after the end is 0

V is unbiased for any K, so the gradient is, too. What the guess adds to its variance falls with 1 / K. The start s_0 needs
no continuations of its own: the other rollouts of the group are continuations from it (`start_values`). A rollout's own
return must not be among them. With the mean of the whole group, the gradient of first steps would be (G - 1)/G as long, and
that of later steps as long as it should be: another direction, not only another length as with GRPO's baseline (`rloo`).
The authors' code leaves a rollout out, too: it writes K others from the prompt, which we save.

Changed from the paper: no discount, because its gamma is 1. Where a step's continuations are missing, `fill_values` takes
the value of the nearest known state before it, so the credit of the steps in between goes to the step that reaches the next
known state. This is a rule over what is logged, never over what happened to arrive.

Axes: G rollouts of a group; S steps of one rollout; K continuations of one state; T tokens of the policy in the rollout.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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

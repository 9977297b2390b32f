"""Return-to-go over turns: a turn is credited with what came after it, not with what came before (G(PO)MDP, Baxter and
Bartlett 2001, J. Artif. Intell. Res. 15).

Called by `ledger/algorithm` in runs whose credit is named "turns". numpy alone. It knows no tokens and no environment.

    symbol    meaning                                                                    argument
    r_i^s     reward that turn s of rollout i earns; the last turn earns the score, too  rewards_G_S
    gamma     discount of a turn; 1 counts later turns in full                           gamma
    G_i^s     sum of gamma^(k - s) r_i^k over the turns k >= s
    A_i^s     G_i^s - (1 / n) sum_j G_j^s: of every token of the turn

A reward that was earned before a turn does not depend on it, so leaving it out keeps the gradient's expectation and takes
away variance. The baseline of a turn is the mean over all n rollouts of the group; one that has ended before has earned
nothing more, so its G is 0 there. With one turn in each rollout this is the advantage of `grpo_advantages`.

Changed from the paper: the baseline is the group's, which includes the rollout itself, so the expected gradient is
(n - 1) / n times the true one, as in GRPO.

Axes: G rollouts of one group; S turns of a rollout, which differ in number.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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

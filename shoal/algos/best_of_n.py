"""Best of n: which answer to take, and what reward that would have, estimated without bias from more samples than n.

No role calls it yet: it is for evaluation and selection. Python alone. It knows no group's task.

    symbol     meaning                                                                       argument
    R_(i)      the i-th smallest of G rewards                                                rewards_G
    n          answers of which the best is taken; n <= G                                    n
    E_n        sum_i C(i - 1, n - 1) / C(G, n) R_(i): mean over all sets of n of their best
    KL         log n - (n - 1) / n: how far the best of n is at most from the policy, nats   arXiv:2401.01879

With rewards 0 and 1, E_n is pass@n in the unbiased form of Codex (arXiv:2107.03374, equation 1).

Changed from that paper: any rewards.

Axes: G rollouts of one task.
"""

import math
from collections.abc import Sequence


def best_of(rewards_G: Sequence[float]) -> int:
    """Index of the best rollout; of equal ones, the first."""
    return max(range(len(rewards_G)), key=lambda index: (rewards_G[index], -index))


def expected_best(rewards_G: Sequence[float], n: int) -> float:
    """E_n. Raises ValueError unless 1 <= n <= G."""
    G = len(rewards_G)
    if not 1 <= n <= G:
        raise ValueError(f"n = {n}: must be between 1 and the number of rollouts, {G}")
    sets = math.comb(G, n)
    return math.fsum(math.comb(i, n - 1) / sets * reward for i, reward in enumerate(sorted(rewards_G)))


def kl_of_best(n: int) -> float:
    """The bound on KL, nats."""
    return math.log(n) - (n - 1) / n

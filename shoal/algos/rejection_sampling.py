"""Rejection sampling: which rollouts of a group the next imitation learns from, as a pure rule over logged rewards.

Python alone. Nothing is drawn: the logged rewards decide the rows.

    rule     keeps of each group                                                              paper
    STaR     those that are right, at most `most` of them                                     arXiv:2203.14465, algorithm 1
    RAFT     the best `keep` by reward, unless all are alike                                  arXiv:2304.06767, algorithm 1

Imitating the right ones with equal weight is one step of expectation maximisation, and follows the gradient of the solve
rate at the policy that sampled. Ties go to the rollout that comes first in its group, so that neither arrival nor
floating-point order decides.

Changed from the papers: STaR's rationalisation, which shows the answer to the policy, is left out, because its prompt is
another than the task's. RAFT takes the best of each prompt; a group in which all rewards are equal has no best, and is
left out.

Axes: G rollouts of one group.
"""

from collections.abc import Sequence


def star(rewards_G: Sequence[float], right: float = 1.0, most: int = 0) -> list[int]:
    """Indices of the rollouts with at least the reward `right`, ascending: the first `most`, or all if that is 0."""
    kept = [index for index, reward in enumerate(rewards_G) if reward >= right]
    return kept[:most] if most else kept


def raft(rewards_G: Sequence[float], keep: int = 1) -> list[int]:
    """Indices of the best `keep` rollouts, ascending; none if all rewards are alike."""
    if keep < 1:
        raise ValueError(f"keep = {keep}: must be at least 1")
    if not rewards_G or min(rewards_G) == max(rewards_G):
        return []
    order = sorted(range(len(rewards_G)), key=lambda index: (-rewards_G[index], index))
    return sorted(order[:keep])

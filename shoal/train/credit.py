"""What each token of a group's rollouts is worth: the rollout's advantage, or with continuations, that of its step.

Called by `train/rows`. The rewards of continuations are those that validators recomputed, in the order of
`protocol/continuations`, and the places follow from the group's bytes. So no bytes of a continuation are read here.

Axes: G rollouts of the group, S steps of one rollout, P tokens of it that the policy learns from.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.algos.vine import fill_values, of_tokens, start_values, step_advantages, vine_values
from shoal.ledger.algorithm import advantages
from shoal.protocol.algorithms import Algorithm, vine_of
from shoal.protocol.continuations import places
from shoal.protocol.types import POLICY, Group, Rollout


def credit(
    group: Group, rewards_G: Sequence[float], continuations: Sequence[float], algorithm: Algorithm
) -> list[NDArray[np.float32]]:
    """The advantage of each learned token of each rollout, G arrays float32[P].

    The first state's value is the mean reward of the group's other rollouts. Where an event made the continuations of a
    group void, each of its rollouts is one step. Raises `ValueError` if there are not as many continuations as the group's
    places need.
    """
    vine = vine_of(algorithm)
    if vine is None:
        num_G = [rollout.author.count(POLICY) for rollout in group.rollouts]
        advantages_G = advantages(rewards_G, algorithm)
        return [np.full(num, A, dtype=np.float32) for num, A in zip(num_G, advantages_G, strict=True)]
    void = not continuations  # guard: void-continuations-fall-back
    places_G = [() if void else places(rollout, vine) for rollout in group.rollouts]
    due = sum(map(len, places_G)) * vine.continuations
    if due != len(continuations):
        raise ValueError(f"{len(continuations)} rewards of continuations for {due} due")
    found, left = [], iter(continuations)
    for rollout, reward, start, at in zip(group.rollouts, rewards_G, start_values(rewards_G), places_G, strict=True):
        returns_S_K = [[next(left) for _ in range(vine.continuations)] for _ in at]
        found.append(_of_rollout(rollout, reward, at, [start, *vine_values(returns_S_K)]))
    return found


def _of_rollout(
    rollout: Rollout, reward: float, places_S: Sequence[int], values_S: Sequence[float | None]
) -> NDArray[np.float32]:
    """The advantages of one rollout's tokens: its steps begin at its first learned token and at its places."""
    learned_P = np.flatnonzero(rollout.author_T() == POLICY)
    edges = [0, *np.searchsorted(learned_P, places_S).tolist(), len(learned_P)]
    rewards_S = [0.0] * (len(edges) - 2) + [reward]
    A_S = step_advantages(fill_values(values_S).tolist(), rewards_S)
    return of_tokens(A_S.tolist(), np.diff(edges).tolist()).astype(np.float32)

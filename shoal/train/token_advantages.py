"""What each token of a group's rollouts is worth: the rollout's advantage, or that of its turn or step.

The rewards of continuations are those that validators recomputed, in the order of `protocol/continuations`, and the places
follow from the group's bytes. So no bytes of a continuation are read here. The rewards of turns and steps are those that
validators recomputed, too, with the tokens at which each ends.

Axes: G rollouts of the group, S steps of one rollout, P tokens of it that the policy learns from.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.algos.advantages import fill_values, of_tokens, start_values, step_advantages, vine_values
from shoal.ledger.group_advantages import advantages, advantages_by_step
from shoal.protocol.algorithm_config import Algorithm, needs_critic, step_credit_of, vine_of
from shoal.protocol.audit_and_pay import MAX_REWARD
from shoal.protocol.continuations import places
from shoal.protocol.messages import POLICY, Group, Rollout, StepRewards
from shoal.protocol.reward_rules import has_enough_rollouts, malformed_steps, step_of_tokens, without_faults


def credit(
    group: Group,
    rewards_G: Sequence[float],
    continuations: Sequence[float],
    algorithm: Algorithm,
    steps_G: Sequence[StepRewards] = (),
    faults: Sequence[int] = (),
    faulted_continuations: Sequence[int] = (),
) -> list[NDArray[np.float32]]:
    """The advantage of each learned token of each rollout, G arrays float32[P]. Rollouts with `faults` are worth 0, and
    continuations with faults say nothing of a state.

    In a run with vines, the first state's value is the mean reward of the group's other rollouts. Where an event made the
    continuations of a group void, each of its rollouts is one step. Raises `ValueError` if there are not as many
    continuations as the group's places need, or not the steps of each rollout in a run that credits steps.
    """
    if step_credit_of(algorithm) and not needs_critic(algorithm):
        _demand_steps(group, rewards_G, steps_G, algorithm)
        return [
            A_S[step_of_tokens(rollout, steps)]
            for rollout, steps, A_S in zip(
                group.rollouts, steps_G, advantages_by_step(steps_G, algorithm, faults), strict=True
            )
        ]
    vine, num_G = vine_of(algorithm), [rollout.author.count(POLICY) for rollout in group.rollouts]
    if not has_enough_rollouts(len(rewards_G), faults):
        return [np.zeros(num, dtype=np.float32) for num in num_G]
    if vine is None:
        advantages_G = advantages(rewards_G, algorithm, faults)
        return [np.full(num, A, dtype=np.float32) for num, A in zip(num_G, advantages_G, strict=True)]
    void = not continuations  # guard: void-continuations-fall-back
    places_G = [() if void else places(rollout, vine) for rollout in group.rollouts]
    due = sum(map(len, places_G)) * vine.continuations
    if due != len(continuations):
        raise ValueError(f"{len(continuations)} rewards of continuations for {due} due")
    found, left, starts = [], iter(enumerate(continuations)), iter(start_values(without_faults(rewards_G, faults)))
    for index, (rollout, reward, at) in enumerate(zip(group.rollouts, rewards_G, places_G, strict=True)):
        drawn_S_K = [[next(left) for _ in range(vine.continuations)] for _ in at]
        if index in faults:
            found.append(np.zeros(num_G[index], dtype=np.float32))
            continue
        # guard: faulted-continuations-say-nothing
        returns_S_K = [[R for place, R in drawn_K if place not in faulted_continuations] for drawn_K in drawn_S_K]
        found.append(_of_rollout(rollout, reward, at, [next(starts), *vine_values(returns_S_K)]))
    return found


def token_rewards(
    group: Group, rewards_G: Sequence[float], algorithm: Algorithm, steps_G: Sequence[StepRewards]
) -> list[NDArray[np.float32]] | None:
    """What is earned at each learned token of each rollout, for a critic: G arrays float32[P]. None if the last token earns
    all, as in runs that credit no steps. Raises `ValueError` as `credit` does.

    A step earns at its last learned token. If nothing is learned from it, what it earns follows the step before.
    """
    if not (step_credit_of(algorithm) and needs_critic(algorithm)):
        return None
    _demand_steps(group, rewards_G, steps_G, algorithm)
    found = []
    for rollout, steps in zip(group.rollouts, steps_G, strict=True):
        step_P = step_of_tokens(rollout, steps)
        r_P = np.zeros(len(step_P))
        for number, step in enumerate(steps):
            if (before := step_P[step_P <= number]).size:
                r_P[np.flatnonzero(step_P == before.max())[-1]] += step.reward
        found.append(r_P.astype(np.float32))
    return found


def _demand_steps(
    group: Group, rewards_G: Sequence[float], steps_G: Sequence[StepRewards], algorithm: Algorithm
) -> None:
    """The rules refuse nearly all other verdicts. They do not know how long a rollout is, so a validator that lies may say
    that a step ends after it. A host that lies may say anything."""
    credit, tokens = step_credit_of(algorithm), max(len(rollout.author) for rollout in group.rollouts)
    assert credit is not None, "only runs that credit steps ask"
    fault = malformed_steps(steps_G, rewards_G, credit.most, tokens, MAX_REWARD)
    if fault:  # guard: credited-steps-are-there
        raise ValueError(f"the batch {fault}")


def _of_rollout(
    rollout: Rollout, reward: float, places_S: Sequence[int], values_S: Sequence[float | None]
) -> NDArray[np.float32]:
    """The advantages of one rollout's tokens: its steps begin at its first learned token and at its places."""
    learned_P = np.flatnonzero(rollout.author_T() == POLICY)
    edges = [0, *np.searchsorted(learned_P, places_S).tolist(), len(learned_P)]
    rewards_S = [0.0] * (len(edges) - 2) + [reward]
    A_S = step_advantages(fill_values(values_S).tolist(), rewards_S)
    return of_tokens(A_S.tolist(), np.diff(edges).tolist()).astype(np.float32)

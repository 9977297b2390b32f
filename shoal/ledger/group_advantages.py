"""What a group teaches, by the run's algorithm: from its settings to the numpy half in `algos`.

So it is here, on the lowest floor that may know both the settings and the formulas. The loss, which needs torch, is found
by `train/loss`. It uses neither tokens nor the model.

Axes: G rollouts of one group.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal.algos.advantages import (
    group_advantages,
    maxrl_advantages,
    maxrl_has_signal,
    process_advantages,
    returns_differ,
    rewards_differ,
    rloo_advantages,
    step_rewards_differ,
    turn_advantages,
)
from shoal.protocol.algorithm_config import Algorithm, Steps, Turns, judged_by_trainer, step_credit_of
from shoal.protocol.messages import StepRewards
from shoal.protocol.reward_rules import has_enough_rollouts, of_each, without_faults


def teaches(
    rewards_G: Sequence[float], algorithm: Algorithm, steps_G: Sequence[StepRewards] = (), faults: Sequence[int] = ()
) -> bool:
    """Whether the algorithm can learn anything from a group with these rewards: whether it has signal. `steps_G` is
    what the rollouts' turns or steps earn, in runs that credit them. Rollouts with `faults` count in nothing."""
    if not has_enough_rollouts(len(rewards_G), faults):
        return False
    rewards_G, steps_G = without_faults(rewards_G, faults), without_faults(steps_G, faults)
    if judged_by_trainer(algorithm):
        # Equal rewards say nothing here: a critic may have expected others, and a teacher or reward model ignores them.
        return True
    match algorithm.advantage, algorithm.credit:
        case "maxrl", _:
            return maxrl_has_signal(rewards_G)
        case "reward", _:
            return any(rewards_G)
        case _, Turns(discount):
            return returns_differ(of_each(steps_G), discount)
        case _, Steps():
            return step_rewards_differ(of_each(steps_G))
        case _:
            return rewards_differ(rewards_G)


def advantages(rewards_G: Sequence[float], algorithm: Algorithm, faults: Sequence[int] = ()) -> NDArray[np.float32]:
    """What each rollout of a group is worth to the learner, float32[G]: above 0 it is encouraged, below 0 discouraged.

    0 where a model of the trainer's decides it: its credit needs tokens, and no other node has it. Rollouts with `faults`
    are worth 0, and change nothing of what the others are worth, unless too few are left.
    """
    if faults:  # guard: faults-are-worth-nothing
        worth_G = np.zeros(len(rewards_G), dtype=np.float32)
        if has_enough_rollouts(len(rewards_G), faults):
            worth_G[without_faults(range(len(rewards_G)), faults)] = advantages(
                without_faults(rewards_G, faults), algorithm
            )
        return worth_G
    match algorithm.advantage:
        case "mean" | "mean_std" as method:
            return group_advantages(rewards_G, method)
        case "rloo":
            return rloo_advantages(rewards_G)
        case "maxrl":
            return maxrl_advantages(rewards_G)
        case "reward":
            return np.asarray(rewards_G, dtype=np.float32)
        case "gae" | "teacher" | "reward_model":
            return np.zeros(len(rewards_G), dtype=np.float32)


def advantages_by_step(
    steps_G: Sequence[StepRewards], algorithm: Algorithm, faults: Sequence[int] = ()
) -> list[NDArray[np.float32]]:
    """What each turn or step of each rollout is worth, float32[S] for each: in runs that credit them, without a critic.
    Those of rollouts with `faults` are worth 0."""
    if faults:  # guard: faulty-steps-are-worth-nothing
        zeros_G = [np.zeros(len(steps), dtype=np.float32) for steps in steps_G]
        if not has_enough_rollouts(len(steps_G), faults):
            return zeros_G
        worth = iter(advantages_by_step(without_faults(steps_G, faults), algorithm))
        return [zeros_S if index in faults else next(worth) for index, zeros_S in enumerate(zeros_G)]
    credit = step_credit_of(algorithm)
    assert credit is not None, "only runs that credit steps ask"
    if isinstance(credit, Turns):
        return turn_advantages(of_each(steps_G), credit.discount)
    method: Literal["mean", "mean_std"] = "mean_std" if algorithm.advantage == "mean_std" else "mean"
    return process_advantages(of_each(steps_G), method)

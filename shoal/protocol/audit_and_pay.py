"""What all nodes must agree on about audits: what groups pay, what a verdict may say, and which groups are audited.

`ledger/submissions` draws groups for audit at the rate of the rules; `must_audit` adds those of great influence.
"""

from collections.abc import Sequence

from msgspec import UnsetType

from shoal.protocol.algorithm_config import Algorithm, judged_by_trainer, vine_of
from shoal.protocol.encoding import float_sum
from shoal.protocol.messages import GroupVerdict, Rules, StepRewards
from shoal.protocol.reward_rules import has_enough_rollouts, largest_credits, without_faults

CHECKS = (
    "shape", "lease", "prompt", "environment", "reward", "ending", "complete", "sampling", "logprobs", "activations",
    "replay",
)  # fmt: skip
"""Checks that a verdict may name. Refusals are counted by check, so this bounds the size of answers. A name may be
added; changing or removing one breaks: replay of logs that hold it."""

REPLAY = "replay"
"""What a void slot names whose environment was stopped on a validator's machine, so that nothing was judged."""

MAX_REWARD = 1e6
"""Largest size of the reward of one rollout, or of one of its steps. Larger ones could add up to infinity, which no log can
hold."""

MAX_REASON_CHARS = 300
"""Length of what a verdict says about one group, its check and detail together: people read it in terminals."""


def influence(
    rewards: Sequence[float],
    tokens: int,
    algorithm: Algorithm,
    steps: Sequence[StepRewards] | UnsetType = (),
    faults: Sequence[int] = (),
) -> float:
    """How far a group can move the policy: how far it can move the policy at one token, times its policy tokens. Rollouts
    with `faults` move nothing."""
    if not has_enough_rollouts(len(rewards), faults):
        return 0.0
    rewards, steps = without_faults(rewards, faults), without_faults(steps or (), faults)
    return _advantage(rewards, algorithm, steps) * tokens


def _advantage(rewards: Sequence[float], algorithm: Algorithm, steps: Sequence[StepRewards]) -> float:
    """The mean size of a token's advantage, as far as rewards say it; else a bound of it, up to a factor that all groups of
    a run share. Where steps have rewards of their own, the most that one of a rollout's steps is worth counts."""
    if not rewards:
        return 0.0
    mean = float_sum(rewards) / len(rewards)
    distance = float_sum(abs(reward - mean) for reward in rewards) / len(rewards)
    if judged_by_trainer(algorithm) or vine_of(algorithm) is not None:
        # What a critic, a frozen model or continuations say of a token has nothing to do with how the rewards differ.
        return 1.0  # guard: judged-by-length
    if steps:
        return _step_advantage(steps, algorithm)  # guard: steps-have-influence
    match algorithm.advantage:
        case "reward":
            return float_sum(map(abs, rewards)) / len(rewards)  # guard: equal-rewards-count
        case "maxrl":
            return distance / mean if mean > 0 else 0.0  # guard: seldom-solved-counts
        case "mean_std":
            return float(distance > 0)  # guard: deviation-divides-out
        case _:
            return distance


def _step_advantage(steps: Sequence[StepRewards], algorithm: Algorithm) -> float:
    """The same where steps have rewards of their own: by deviations, each step that follows counts for one."""
    credits = largest_credits(steps)
    if algorithm.advantage == "mean_std":
        return sum(map(len, steps)) / len(steps) if any(credits) else 0.0
    return float_sum(credits) / len(steps)


def paid_tokens(tokens: int, rules: Rules, rollouts: int | None = None) -> int:
    """Of a group's policy tokens, those that are paid: text beyond the run's cap earns nothing. A group of continuations
    has another number of `rollouts` than the run's group size."""
    most = rules.paid_tokens * (rules.group_size if rollouts is None else rollouts)
    return min(tokens, most) if rules.paid_tokens else tokens  # guard: paid-length


def pay_of(group: GroupVerdict, rules: Rules) -> int:
    """What a group brings its worker if this verdict on it holds, tokens."""
    return paid_tokens(group.tokens, rules, len(group.rewards))


def must_audit(
    draw: float, rate: float, influence: float, mean_influence: float, pay: float = 0.0, mean_pay: float = 0.0,
    failed: bool = False,
) -> bool:  # fmt: skip
    """Whether a group is audited. Influence above the run's mean raises the rate in proportion. So does pay above the mean
    pay of the worker's newest groups, those that a refusal takes: a forged group then risks as many times its own pay,
    however long it is. Less than the mean changes nothing.

    A group on which the environment `failed` is always audited: rollouts with faults do not count, so else a forger that
    makes the environment fail would choose which rewards do.

    The draw, in [0, 1), was made before anyone knew the rewards or the length. `mean_influence` is 0 before the first
    accepted group. `mean_pay` is 0 for a worker without unvested pay, whose rate is 1.
    """
    # guard: influence-raises-the-rate, pay-raises-the-rate, influence-never-lowers-the-rate
    raised = max(1.0, _over(influence, mean_influence), _over(pay, mean_pay))
    return failed or draw < rate * raised  # guard: faults-are-audited


def _over(value: float, mean: float) -> float:
    return value / mean if mean > 0.0 else 1.0

"""Collapse: the policy is being destroyed. Its reward falls far below its own best, its solve rate goes to 0, or its
gradient explodes.

Reward is compared with the run's own past and noise, never with a number. Where the run draws harder tasks as the
policy improves, reward may fall without a fault, so it is not looked at.
"""

from collections.abc import Iterator
from statistics import median

from shoal.monitors.inputs import (
    LEAST_STEPS,
    START_STEPS,
    LimitExceeded,
    MonitorInputs,
    is_number,
    measured,
    noise_of,
    now_of,
    smoothed,
)

REMEDY = (
    "Pause, read rollouts, resume with a smaller train.lr from an earlier checkpoint (policy.path); or lower it now with "
    "`shoal admin rate`"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At reward, solve rate and gradient of the newest step."""
    yield from (found for found in (_reward(view), _solved(view), _gradient(view)) if found)


def _reward(view: MonitorInputs) -> LimitExceeded | None:
    rewards = view.series("reward_all_mean")
    if view.moving_tasks or len(rewards) < LEAST_STEPS:
        return None
    middle = smoothed(rewards)
    best, now, lowest = max(middle), middle[-1], min(middle[: middle.index(max(middle)) + 1])
    allowed = max(view.limit("collapse.share") * (best - lowest), view.limit("collapse.noises") * noise_of(rewards))
    limit = best - max(allowed, view.limit("collapse.best") * abs(best), 1e-6)
    if now >= limit:
        return None
    what = f"reward fell from {best:.3g} to {now:.3g}"
    return LimitExceeded("critical", what, REMEDY, (measured("reward_all_mean", now, limit),))


def _solved(view: MonitorInputs) -> LimitExceeded | None:
    rates, was = view.series("solve_rate"), view.limit("collapse.solved")
    if len(rates) < LEAST_STEPS or now_of(rates) > 0 or max(smoothed(rates)) <= was:
        return None
    what = f"the solve rate was {max(smoothed(rates)):.1%} and is 0"
    return LimitExceeded("critical", what, REMEDY, (measured("solve_rate", 0.0, was),))


def _gradient(view: MonitorInputs) -> LimitExceeded | None:
    skipped = sum(bool(line.get("update_skipped")) and bool(line.get("rollouts")) for line in view.lines[-START_STEPS:])
    if skipped and view.lines[-1].get("update_skipped") and view.lines[-1].get("rollouts"):
        what = f"{skipped} of the last {START_STEPS} gradients were not finite"
        return LimitExceeded("critical", what, REMEDY, (measured("update_skipped", skipped, 0.0),))
    norms = view.series("grad_norm")
    if len(norms) < LEAST_STEPS or not is_number(view.lines[-1].get("grad_norm")):
        return None
    limit = max(view.limit("collapse.grad_growth") * median(norms[:-1]), view.limit("collapse.grad_norm"))
    if norms[-1] <= limit:
        return None
    what = f"the norm of the gradient is {norms[-1]:.3g}, usually {median(norms[:-1]):.3g}"
    return LimitExceeded("critical", what, REMEDY, (measured("grad_norm", norms[-1], limit),))

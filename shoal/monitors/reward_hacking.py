"""Reward hacking: reward rises, and something that should rise with it does not.

Five signs. The policy is worse on held-out tasks than it was. A held-out judge, another environment that nothing is
trained on, thinks less of its answers there. Fewer rollouts are solved. Within groups, reward follows length, and
rollouts become long. Rollouts repeat themselves. What it cannot see without a judge: a hack that is short, varied, and
passes on held-out tasks, because the same environment scores those. With one: a hack that the judge likes as well, or
that was there before the first evaluation.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from shoal.monitors.inputs import (
    LEAST_STEPS,
    START_STEPS,
    HeldoutResult,
    LimitExceeded,
    MonitorInputs,
    is_number,
    measured,
    noise_of,
    now_of,
    smoothed,
    start_of,
)

REMEDY = (
    "Read rollouts of the newest steps. Correct what the environment rewards by mistake, and begin a new run: a changed "
    "environment is another run"
)

BOTH = ("reward_all_mean", "solve_rate")


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At the signs, if reward has risen since the start."""
    yield from (found for found in (_judged(view), _heldout(view)) if found)
    rewards = view.series("reward_all_mean")
    if len(rewards) < LEAST_STEPS:
        return
    risen, least = now_of(rewards) - start_of(rewards), view.limit("hacking.reward_noises") * noise_of(rewards)
    if risen <= max(least, 1e-3):
        return
    for found in (_solved(view), _length(view), _repetition(view)):
        if found is not None:
            yield found


def _heldout(view: MonitorInputs) -> LimitExceeded | None:
    """What the environment itself says of held-out tasks."""
    fell = _fell(view, view.heldout, view.at_best)
    if fell is None:
        return None
    best, newest = fell
    what = f"held-out tasks fell from {best.mean:.1%} to {newest.mean:.1%} while reward in training rose"
    return LimitExceeded("critical", what, REMEDY, (measured("held-out mean", newest.mean, best.low95),))


def _judged(view: MonitorInputs) -> LimitExceeded | None:
    """What the held-out judge says of the same episodes."""
    fell = _fell(view, view.judged, view.at_best_judged)
    if fell is None:
        return None
    best, newest = fell
    what = f"the held-out judge gave {best.mean:.3g} and gives {newest.mean:.3g}, while reward in training rose"
    return LimitExceeded("critical", what, REMEDY, (measured("judge's mean", newest.mean, best.low95),))


def _fell(
    view: MonitorInputs, seen: Sequence[HeldoutResult], at_best: Sequence[Mapping[str, Any]]
) -> tuple[HeldoutResult, HeldoutResult] | None:
    """The best evaluation but the newest, and the newest, if their intervals are apart and reward rose between them."""
    if len(seen) < 2:
        return None
    newest, best = seen[-1], max(seen[:-1], key=lambda one: one.mean)
    then, rewards = MonitorInputs(at_best).series("reward_all_mean"), view.series("reward_all_mean")
    least = view.limit("hacking.reward_noises") * noise_of(rewards)
    # guard: judge-against-reward
    rose = bool(then and rewards) and now_of(rewards) - median(then) > max(least, 1e-3)
    return (best, newest) if rose and newest.high95 < best.low95 else None


def _solved(view: MonitorInputs) -> LimitExceeded | None:
    both = MonitorInputs([line for line in view.lines if {*map(is_number, map(line.get, BOTH))} == {True}])
    rewards, rates = (both.series(name) for name in BOTH)
    if len(rates) < LEAST_STEPS or view.moving_tasks:
        return None
    middle = smoothed(rates)
    best = middle.index(max(middle))
    limit = middle[best] - view.limit("hacking.solved_fall")
    if now_of(rates) >= limit or now_of(rewards) < smoothed(rewards)[best]:
        return None
    what = f"fewer rollouts are solved ({middle[best]:.1%}, now {now_of(rates):.1%}) while reward rises"
    return LimitExceeded("warning", what, REMEDY, (measured("solve_rate", now_of(rates), limit),))


def _length(view: MonitorInputs) -> LimitExceeded | None:
    lengths = [
        line["policy_tokens"] / line["rollouts"]
        for line in view.lines
        if line.get("policy_tokens") and line.get("rollouts")
    ]
    follows = view.series("reward_length_correlation")
    if len(lengths) < LEAST_STEPS or len(follows) < START_STEPS:
        return None
    limit, most = view.limit("hacking.length") * start_of(lengths), view.limit("hacking.correlation")
    # The highest counts: once all rollouts are long, they differ in length no more.
    if now_of(lengths) <= limit or max(smoothed(follows)) <= most:
        return None
    what = f"reward follows length, and rollouts grew from {start_of(lengths):.3g} to {now_of(lengths):.3g} tokens"
    facts = measured("policy_tokens/rollouts", now_of(lengths), limit)
    return LimitExceeded(
        "warning", what, REMEDY, (facts, measured("reward_length_correlation", max(smoothed(follows)), most))
    )


def _repetition(view: MonitorInputs) -> LimitExceeded | None:
    shares = view.series("repetition_share")
    if len(shares) < LEAST_STEPS:
        return None
    limit = start_of(shares) + view.limit("hacking.repetition")
    if now_of(shares) <= limit:
        return None
    what = f"rollouts repeat themselves: {now_of(shares):.1%} of their 4-grams, {start_of(shares):.1%} at the start"
    return LimitExceeded("warning", what, REMEDY, (measured("repetition_share", now_of(shares), limit),))

"""Monitors of learning: drift, collapse, entropy, reward hacking and missing signal, from the metrics of steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from shoal.monitors.monitor_inputs import (
    LEAST_STEPS,
    START_STEPS,
    HeldoutResult,
    LimitExceeded,
    Machine,
    MonitorInputs,
    measured,
    noise_of,
    now_of,
    smoothed,
    start_of,
)
from shoal.protocol.rollout_validation import unbegun_remedy
from shoal.step_metrics import is_number

# --- drift ---

LOG_RATIO = "log_ratio_abs_mean_nats"
DRIFT_REMEDY = (
    "Lower train.lr (`shoal admin rate`) or rollouts.max_staleness. If it is so from the first step on, compare the "
    "temperature, the chat template and the precision of sampling and training"
)


def drift(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """The policy that learns gives the sampled tokens other probabilities than the policy that sampled them.

    A little is normal: rollouts are some versions old, and engines round. Much means that updates are too large, that
    rollouts are too old, or that both do not compute the same: another temperature, another template, another precision.
    """
    values = view.series(LOG_RATIO)
    if not values or not is_number(view.lines[-1].get(LOG_RATIO)):
        return
    now, most = values[-1], view.limit("drift.nats")
    usual = median(values[:-1]) if len(values) > LEAST_STEPS else 0.0
    grown = max(view.limit("drift.growth") * usual, view.limit("drift.floor_nats"))
    gaps, gap_limit = view.series("selfcheck_gap_nats"), view.limit("drift.selfcheck_nats")
    gap = gaps[-1] if gaps and view.dtype != "int8" else 0.0
    if now > most:
        what = f"|log ratio| is {now:.3g} nats a token on average"
        yield LimitExceeded("critical", what, DRIFT_REMEDY, (measured(LOG_RATIO, now, most),))
    elif usual and now > grown:
        what = f"|log ratio| has grown from {usual:.3g} to {now:.3g} nats a token"
        yield LimitExceeded("warning", what, DRIFT_REMEDY, (measured(LOG_RATIO, now, grown),))
    elif gap > gap_limit:
        what = f"a completion computed again differed by {gap:.3g} nats"
        yield LimitExceeded("critical", what, DRIFT_REMEDY, (measured("selfcheck_gap_nats", gap, gap_limit),))


# --- collapse ---

COLLAPSE_REMEDY = (
    "Pause, read rollouts, resume with a smaller train.lr from an earlier checkpoint (policy.path); or lower it now with "
    "`shoal admin rate`"
)


def collapse(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """The policy is being destroyed: its reward falls far below its own best, its solve rate goes to 0, or its gradient
    explodes.

    Reward is compared with the run's own past and noise, never with a number. Where the run draws harder tasks as the
    policy improves, reward may fall without a fault, so it is not looked at.
    """
    yield from (found for found in (_reward_fell(view), _nothing_solved(view), _gradient(view)) if found)


def _reward_fell(view: MonitorInputs) -> LimitExceeded | None:
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
    return LimitExceeded("critical", what, COLLAPSE_REMEDY, (measured("reward_all_mean", now, limit),))


def _nothing_solved(view: MonitorInputs) -> LimitExceeded | None:
    rates, was = view.series("solve_rate"), view.limit("collapse.solved")
    if len(rates) < LEAST_STEPS or now_of(rates) > 0 or max(smoothed(rates)) <= was:
        return None
    what = f"the solve rate was {max(smoothed(rates)):.1%} and is 0"
    return LimitExceeded("critical", what, COLLAPSE_REMEDY, (measured("solve_rate", 0.0, was),))


def _gradient(view: MonitorInputs) -> LimitExceeded | None:
    skipped = [bool(line.get("update_skipped")) and bool(line.get("rollouts")) for line in view.lines[-START_STEPS:]]
    if skipped and skipped[-1]:
        what = f"{sum(skipped)} of the last {START_STEPS} gradients were not finite"
        return LimitExceeded("critical", what, COLLAPSE_REMEDY, (measured("update_skipped", sum(skipped), 0.0),))
    norms = view.series("grad_norm")
    if len(norms) < LEAST_STEPS or not is_number(view.lines[-1].get("grad_norm")):
        return None
    limit = max(view.limit("collapse.grad_growth") * median(norms[:-1]), view.limit("collapse.grad_norm"))
    if norms[-1] <= limit:
        return None
    what = f"the norm of the gradient is {norms[-1]:.3g}, usually {median(norms[:-1]):.3g}"
    return LimitExceeded("critical", what, COLLAPSE_REMEDY, (measured("grad_norm", norms[-1], limit),))


# --- entropy ---

ENTROPY_REMEDY = (
    "Resume with a smaller train.lr, a higher sampling.temperature, or an entropy bonus or decoupled clipping in "
    "train.algorithm, from an earlier checkpoint"
)


def entropy(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """The policy has become certain of what it writes, and what it writes does not solve its tasks.

    Rollouts of one task are then all alike, and soon no group has signal. A policy that masters its tasks is certain as
    well, so low entropy alone says nothing.
    """
    entropies, solved = view.series("entropy_nats"), view.series("solve_rate")
    if len(entropies) < LEAST_STEPS or not solved:
        return
    limit, most = view.limit("entropy.share") * start_of(entropies), view.limit("entropy.solved")
    now, rate = now_of(entropies), now_of(solved)
    if now < limit and rate < most:
        what = f"entropy fell from {start_of(entropies):.3g} to {now:.3g} nats, and {rate:.1%} of rollouts are solved"
        facts = measured("entropy_nats", now, limit), measured("solve_rate", rate, most)
        yield LimitExceeded("warning", what, ENTROPY_REMEDY, facts)


# --- reward hacking ---

HACKING_REMEDY = (
    "Read rollouts of the newest steps. Correct what the environment rewards by mistake, and begin a new run: a changed "
    "environment is another run"
)


def hacking(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """Reward rises, and something that should rise with it does not.

    Five signs. The policy is worse on held-out tasks than it was. A held-out judge, another environment that nothing is
    trained on, thinks less of its answers there. Fewer rollouts are solved. Within groups, reward follows length, and
    rollouts become long. Rollouts repeat themselves. What it cannot see without a judge: a hack that is short, varied, and
    passes on held-out tasks, because the same environment scores those. With one: a hack that the judge likes as well, or
    that was there before the first evaluation.
    """
    if fell := _evaluation_fell(view, view.judged, view.at_best_judged):
        best, newest = fell
        what = f"the held-out judge gave {best.mean:.3g} and gives {newest.mean:.3g}, while reward in training rose"
        facts = (measured("judge's mean", newest.mean, best.low95),)
        yield LimitExceeded("critical", what, HACKING_REMEDY, facts)
    if fell := _evaluation_fell(view, view.heldout, view.at_best):
        best, newest = fell
        what = f"held-out tasks fell from {best.mean:.1%} to {newest.mean:.1%} while reward in training rose"
        facts = (measured("held-out mean", newest.mean, best.low95),)
        yield LimitExceeded("critical", what, HACKING_REMEDY, facts)
    rewards = view.series("reward_all_mean")
    if len(rewards) >= LEAST_STEPS and _has_risen(view, now_of(rewards) - start_of(rewards)):
        yield from (found for found in (_fewer_solved(view), _length(view), _repetition(view)) if found)


def _has_risen(view: MonitorInputs, gain: float) -> bool:
    """Whether a gain in reward is more than noise."""
    noise = noise_of(view.series("reward_all_mean"))
    return gain > max(view.limit("hacking.reward_noises") * noise, 1e-3)


def _evaluation_fell(
    view: MonitorInputs, seen: Sequence[HeldoutResult], at_best: Sequence[Mapping[str, Any]]
) -> tuple[HeldoutResult, HeldoutResult] | None:
    """The best evaluation but the newest, and the newest, if their intervals are apart and reward rose between them."""
    if len(seen) < 2:
        return None
    newest, best = seen[-1], max(seen[:-1], key=lambda one: one.mean)
    then, rewards = MonitorInputs(at_best).series("reward_all_mean"), view.series("reward_all_mean")
    # guard: judge-against-reward
    rose = bool(then and rewards) and _has_risen(view, now_of(rewards) - median(then))
    return (best, newest) if rose and newest.high95 < best.low95 else None


def _fewer_solved(view: MonitorInputs) -> LimitExceeded | None:
    names = ("reward_all_mean", "solve_rate")
    both = MonitorInputs([line for line in view.lines if all(is_number(line.get(name)) for name in names)])
    rewards, rates = (both.series(name) for name in names)
    if len(rates) < LEAST_STEPS or view.moving_tasks:
        return None
    middle = smoothed(rates)
    best = middle.index(max(middle))
    limit = middle[best] - view.limit("hacking.solved_fall")
    if now_of(rates) >= limit or now_of(rewards) < smoothed(rewards)[best]:
        return None
    what = f"fewer rollouts are solved ({middle[best]:.1%}, now {now_of(rates):.1%}) while reward rises"
    return LimitExceeded("warning", what, HACKING_REMEDY, (measured("solve_rate", now_of(rates), limit),))


def _length(view: MonitorInputs) -> LimitExceeded | None:
    lengths = [
        line["policy_tokens"] / line["rollouts"]
        for line in view.lines
        if line.get("policy_tokens") and line.get("rollouts")
    ]
    correlations = view.series("reward_length_correlation")
    if len(lengths) < LEAST_STEPS or len(correlations) < START_STEPS:
        return None
    limit, most = view.limit("hacking.length") * start_of(lengths), view.limit("hacking.correlation")
    # The highest counts: once all rollouts are long, they differ in length no more.
    if now_of(lengths) <= limit or (highest := max(smoothed(correlations))) <= most:
        return None
    what = f"reward follows length, and rollouts grew from {start_of(lengths):.3g} to {now_of(lengths):.3g} tokens"
    facts = (
        measured("policy_tokens/rollouts", now_of(lengths), limit),
        measured("reward_length_correlation", highest, most),
    )
    return LimitExceeded("warning", what, HACKING_REMEDY, facts)


def _repetition(view: MonitorInputs) -> LimitExceeded | None:
    shares = view.series("repetition_share")
    if len(shares) < LEAST_STEPS:
        return None
    limit = start_of(shares) + view.limit("hacking.repetition")
    if now_of(shares) <= limit:
        return None
    what = f"rollouts repeat themselves: {now_of(shares):.1%} of their 4-grams, {start_of(shares):.1%} at the start"
    return LimitExceeded("warning", what, HACKING_REMEDY, (measured("repetition_share", now_of(shares), limit),))


# --- no signal ---

ZERO_SIGNAL = "zero_signal_share"
EASY = "All are solved: use harder tasks, or difficulty.pools and difficulty.curriculum"
HARD = (
    "See that `shoal env check` passes; then use easier tasks, larger groups (rollouts.group_size), or a better first "
    "policy: `shoal sft`"
)
BY_LIMIT = "A token limit ended"
CUT = (
    "If answers need more, raise sampling.max_turn_tokens or sampling.max_tokens: a token limit ended {:.0%} of the "
    "rollouts of the step"
)
UNBEGUN = "The tasks of {} of them can never begin; the last: {}. {}"
FALLEN = "Rewards fell: begin anew with a smaller train.lr, from an earlier checkpoint"

FEW_CUT = 0.1
"""Share of a step's rollouts that a token limit ended, below which it was no limit to the policy of then."""
MIN_BEST_RATE, MAX_LEFT = 0.25, 0.25
"""A policy that solved more than this share of a step's rollouts has collapsed if this share of its best reward is left."""


def no_signal(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """Within groups all rewards are equal, so the work that is paid teaches nothing.

    If all are solved, the tasks are too easy; if none is, they are too hard, or the policy does not know the form of an
    answer. Looks at the newest step; between steps, at the groups since the last one with signal.
    """
    solved = view.series("solve_rate")
    remedy = EASY if solved and solved[-1] > 0.5 else HARD
    if (machine := view.machine) is not None:
        most = view.limit("no_signal.flat") * view.max_flat_groups
        if view.max_flat_groups and machine.flat_groups >= max(1.0, most):
            what = f"the last {machine.flat_groups} groups have no signal; at {view.max_flat_groups} the run pauses"
            remedy = _remedy_of_flat_groups(view, machine, remedy)
            yield LimitExceeded("critical", what, remedy, (measured("groups", machine.flat_groups, most),))
        return
    if not view.lines or not is_number(share := view.lines[-1].get(ZERO_SIGNAL)):
        return
    if remedy == HARD and is_number(cut := view.lines[-1].get("overlong_share")) and cut > 0.5:
        remedy = CUT.format(cut)
    limit = view.limit("no_signal.share")
    if share >= limit:
        what = f"{share:.1%} of accepted groups have no signal"
        yield LimitExceeded("warning", what, remedy, (measured(ZERO_SIGNAL, share, limit),))


def _remedy_of_flat_groups(view: MonitorInputs, machine: Machine, remedy: str) -> str:
    """What to do about groups without signal; `remedy` is what the newest step's solve rate suggests."""
    if machine.unbegun_groups > machine.flat_groups / 2:  # no larger group would help
        return UNBEGUN.format(machine.unbegun_groups, machine.unbegun_cause, unbegun_remedy(machine.unbegun_cause))
    rewards = view.series("reward_all_mean")
    least = rewards[-1] if remedy == EASY and rewards else -math.inf
    if machine.flat_reward < least or has_collapsed(view.lines, machine.flat_reward, view.moving_tasks):
        remedy = FALLEN
    why = machine.why_flat
    if remedy == EASY or not why or (remedy == FALLEN and why.startswith(BY_LIMIT) and began_below_limit(view.lines)):
        return remedy
    return _change_first(why) + (f". {FALLEN}" if remedy == FALLEN else "")


def began_below_limit(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a token limit ended few rollouts of the first step. If rewards fell since, that it ends many is a symptom."""
    first = lines[0].get("overlong_share") if lines else None
    return is_number(first) and first < FEW_CUT


def has_collapsed(lines: Sequence[Mapping[str, Any]], flat_reward: float, moving_tasks: bool) -> bool:
    """Whether little is left of the best reward of a policy that solved some tasks. Never where tasks become harder."""
    solved, best = (
        max((line[name] for line in lines if is_number(line.get(name))), default=0.0)
        for name in ("solve_rate", "reward_all_mean")
    )
    return solved > MIN_BEST_RATE and best > 0.0 and not moving_tasks and flat_reward < MAX_LEFT * best


def _change_first(why: str) -> str:
    """What `why_flat` says, with what to change before the cause: little room shows the beginning alone."""
    cause, _, change = why.partition(": ")
    return f"{change[0].upper()}{change[1:]}. {cause}" if change else why


def cause_or_collapse(why: str, lines: Sequence[Mapping[str, Any]], flat_reward: float, moving_tasks: bool) -> str:
    """What to say of the flat groups that paused a run. `why` is what ended them; a limit that ended few rollouts of the
    first step is a symptom if rewards fell since."""
    is_symptom = why.startswith(BY_LIMIT) and began_below_limit(lines)
    return FALLEN if is_symptom and has_collapsed(lines, flat_reward, moving_tasks) else why

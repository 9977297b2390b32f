"""No signal: within groups all rewards are equal, so the work that is paid teaches nothing.

If all are solved, the tasks are too easy; if none is, they are too hard, or the policy does not know the form of an
answer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.monitors.inputs import LimitExceeded, MonitorInputs, is_number, measured
from shoal.protocol.rollout_validation import unbegun_remedy

METRIC = "zero_signal_share"
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
UNBEGUN = "The tasks of {count} of them can never begin; the last: {cause}. {remedy}"
FALLEN = "Rewards fell: begin anew with a smaller train.lr, from an earlier checkpoint"

FEW_CUT = 0.1
"""Share of a step's rollouts that a token limit ended, below which it was no limit to the policy of then."""
MIN_BEST_RATE, MAX_LEFT = 0.25, 0.25
"""A policy that solved more than this share of a step's rollouts has collapsed if this share of its best reward is left."""


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At the newest step; between steps, at the groups since the last one with signal."""
    solved = view.series("solve_rate")
    remedy = EASY if solved and solved[-1] > 0.5 else HARD
    if view.machine is not None:
        rewards = view.series("reward_all_mean")
        least = rewards[-1] if remedy == EASY and rewards else -math.inf
        if view.machine.flat_reward < least or has_collapsed(view.lines, view.machine.flat_reward, view.moving_tasks):
            remedy = FALLEN
        why = view.machine.why_flat
        if remedy == FALLEN and why.startswith(BY_LIMIT) and began_below_limit(view.lines):
            why = ""
        if remedy != EASY and why:
            remedy = _change_first(why) + (f". {FALLEN}" if remedy == FALLEN else "")
        if view.machine.unbegun_groups > view.machine.flat_groups / 2:  # no larger group would help
            remedy = UNBEGUN.format(
                count=view.machine.unbegun_groups, cause=view.machine.unbegun_cause,
                remedy=unbegun_remedy(view.machine.unbegun_cause),
            )  # fmt: skip

        most = view.limit("no_signal.flat") * view.max_flat_groups
        if view.max_flat_groups and view.machine.flat_groups >= max(1.0, most):
            what = (
                f"the last {view.machine.flat_groups} groups have no signal; at {view.max_flat_groups} the run pauses"
            )
            yield LimitExceeded("critical", what, remedy, (measured("groups", view.machine.flat_groups, most),))
        return
    if not view.lines or not is_number(share := view.lines[-1].get(METRIC)):
        return
    if remedy == HARD and is_number(cut := view.lines[-1].get("overlong_share")) and cut > 0.5:
        remedy = CUT.format(cut)
    limit = view.limit("no_signal.share")
    if share >= limit:
        what = f"{share:.1%} of accepted groups have no signal"
        yield LimitExceeded("warning", what, remedy, (measured(METRIC, share, limit),))


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

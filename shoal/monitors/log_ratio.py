"""Drift: the policy that learns gives the sampled tokens other probabilities than the policy that sampled them.

A little is normal: rollouts are some versions old, and engines round. Much means that updates are too large, that
rollouts are too old, or that both do not compute the same: another temperature, another template, another precision.
"""

from collections.abc import Iterator
from statistics import median

from shoal.monitors.inputs import LEAST_STEPS, LimitExceeded, MonitorInputs, is_number, measured

METRIC = "log_ratio_abs_mean_nats"
REMEDY = (
    "Lower train.lr (`shoal admin rate`) or rollouts.max_staleness. If it is so from the first step on, compare the "
    "temperature, the chat template and the precision of sampling and training"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At the newest step's importance ratios, and at the self-check of the start."""
    values = view.series(METRIC)
    if not values or not is_number(view.lines[-1].get(METRIC)):
        return
    now, most = values[-1], view.limit("drift.nats")
    usual = median(values[:-1]) if len(values) > LEAST_STEPS else 0.0
    grown, floor = view.limit("drift.growth") * usual, view.limit("drift.floor_nats")
    gap, gap_limit = _selfcheck(view), view.limit("drift.selfcheck_nats")
    if now > most:
        yield LimitExceeded(
            "critical", f"|log ratio| is {now:.3g} nats a token on average", REMEDY, (measured(METRIC, now, most),)
        )
    elif usual and now > max(grown, floor):
        what = f"|log ratio| has grown from {usual:.3g} to {now:.3g} nats a token"
        yield LimitExceeded("warning", what, REMEDY, (measured(METRIC, now, max(grown, floor)),))
    elif gap > gap_limit:
        what = f"a completion computed again differed by {gap:.3g} nats"
        yield LimitExceeded("critical", what, REMEDY, (measured("selfcheck_gap_nats", gap, gap_limit),))


def _selfcheck(view: MonitorInputs) -> float:
    """The largest gap that was found when the trainer last started; 0 if a gap is expected."""
    gaps = view.series("selfcheck_gap_nats")
    return gaps[-1] if gaps and view.dtype != "int8" else 0.0

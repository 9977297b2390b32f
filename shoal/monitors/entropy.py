"""Entropy loss: the policy has become certain of what it writes, and what it writes does not solve its tasks.

Rollouts of one task are then all alike, and soon no group has signal. A policy that masters its tasks is certain as
well, so low entropy alone says nothing.
"""

from collections.abc import Iterator

from shoal.monitors.inputs import LEAST_STEPS, LimitExceeded, MonitorInputs, measured, now_of, start_of

REMEDY = (
    "Resume with a smaller train.lr, a higher sampling.temperature, or an entropy bonus or decoupled clipping in "
    "train.algorithm, from an earlier checkpoint"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At entropy and solve rate of the newest steps."""
    entropy, solved = view.series("entropy_nats"), view.series("solve_rate")
    if len(entropy) < LEAST_STEPS or not solved:
        return
    limit, most = view.limit("entropy.share") * start_of(entropy), view.limit("entropy.solved")
    now, rate = now_of(entropy), now_of(solved)
    if now < limit and rate < most:
        what = f"entropy fell from {start_of(entropy):.3g} to {now:.3g} nats, and {rate:.1%} of rollouts are solved"
        facts = measured("entropy_nats", now, limit), measured("solve_rate", rate, most)
        yield LimitExceeded("warning", what, REMEDY, facts)

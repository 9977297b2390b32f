"""How long a run still takes, by the wall time of its newest steps.

Called by the terminal view. Pure: it reads a snapshot and no clock. It does not know what strangers will do: a run whose
workers leave takes longer than it says.
"""

from statistics import median

from shoal.launch.snapshot import Snapshot

NEWEST_STEPS = 20
"""Steps that the estimate is made from: enough to even out slow ones, few enough to follow workers that come and go."""

MOST_MEDIANS = 5.0
"""A step counts as at most this many times the median, so that a night without workers does not last for ever."""


def seconds_left(snapshot: Snapshot) -> float | None:
    """Seconds until the last step and the evaluation after it; None if nobody can say."""
    steps = snapshot.steps - snapshot.step
    took_s = [s for s in snapshot.series("step_s")[-NEWEST_STEPS:] if s > 0]
    if steps <= 0 or len(took_s) < 2 or snapshot.status.phase != "running":
        return None
    most_s = MOST_MEDIANS * median(took_s)
    mean_s = sum(min(s, most_s) for s in took_s) / len(took_s)
    return steps * mean_s + snapshot.evaluation_s

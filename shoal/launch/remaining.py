"""How long a run still takes, by the wall time of its newest steps.

Called by the terminal view. Pure: it reads a snapshot and no clock. The pace is that of `shoal/metrics.py`, as on the page.
"""

from shoal.launch.snapshot import Snapshot
from shoal.metrics import pace_of

STILL_S, STILL_STEPS = 10.0, 2.0
"""Nobody can say how long a run takes that has waited for one thing for longer than this, and than so many steps take."""


def seconds_left(snapshot: Snapshot) -> float | None:
    """Seconds until the last step, and the evaluation after it where that is known; None if nobody can say."""
    steps = snapshot.steps - snapshot.step
    if steps <= 0 or len(snapshot.series("step_s")) < 2 or snapshot.status.phase != "running":
        return None
    pace = pace_of(snapshot.metrics, steps)
    if snapshot.status.waiting_s > max(STILL_S, STILL_STEPS * (pace.step_s or 0.0)) or pace.left_s is None:
        return None
    return pace.left_s + snapshot.evaluation_s


def left_label(snapshot: Snapshot) -> str:
    """Name of the time left in a line: whether it is that of the steps alone."""
    return "left" if snapshot.evaluation_s else "left_for_steps"

"""How long a run still takes, by the wall time of its newest steps.

Called by the terminal view. Pure: it reads a snapshot and no clock. The pace is that of `shoal/metrics.py`, as on the page.
"""

from shoal.launch.snapshot import Snapshot
from shoal.metrics import pace_of


def seconds_left(snapshot: Snapshot) -> float | None:
    """Seconds until the last step and the evaluation after it; None if nobody can say."""
    steps = snapshot.steps - snapshot.step
    if steps <= 0 or len(snapshot.series("step_s")) < 2 or snapshot.status.phase != "running":
        return None
    left_s = pace_of(snapshot.metrics, steps).left_s
    return None if left_s is None else left_s + snapshot.evaluation_s

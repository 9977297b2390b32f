"""Slow publishing: steps wait until the version before is written, signed and announced.

It is done beside the next step, so it costs nothing until it takes longer than that step.
"""

from collections.abc import Iterator

from shoal.monitors.inputs import LimitExceeded, MonitorInputs, is_number, measured

REMEDY = (
    "Train an adapter (policy.adapter) or publish bfloat16, which has half of the bytes; use a faster disk; or learn more "
    "per step (rollouts.batch_groups)"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At the newest step."""
    line = view.lines[-1] if view.lines else {}
    took_s, waited_s, step_s = (line.get(name) for name in ("publish_s", "publish_wait_s", "step_s"))
    if not (is_number(took_s) and is_number(waited_s) and is_number(step_s) and step_s):
        return
    share, most = waited_s / step_s, view.limit("publishing.share")
    if took_s > view.limit("publishing.seconds") and share > most:
        what = f"publishing takes {took_s:.0f} s, and {share:.0%} of a step is spent waiting for it"
        yield LimitExceeded("warning", what, REMEDY, (measured("publish_wait_s/step_s", share, most),))

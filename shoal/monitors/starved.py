"""Starved: the trainer waits, and steps take far longer than this run's usual ones.

A trainer waits in every run, since sampling takes longer than learning; only a change is an alarm. Workers left, a
relay is down, or groups with signal have become rare.
"""

from collections.abc import Iterator
from statistics import median

from shoal.monitors.view import LEAST_STEPS, Finding, View, is_number, measured

REMEDY = "Look at the nodes: did workers leave, are their groups refused, do validators keep up? More workers may join"


def look(view: View) -> Iterator[Finding]:
    """At the newest step's time; between steps, at the time since the last one."""
    times_s = view.series("step_s")
    if len(times_s) < LEAST_STEPS:
        return
    least_s = view.limit("starved.seconds")
    if view.machine is not None:
        limit = max(view.limit("starved.growth") * median(times_s), least_s)
        since_s = view.machine.now - view.machine.step_began
        if view.machine.running and view.machine.step_began and since_s > limit:
            what = (
                f"no step for {since_s:.0f} s, usually {median(times_s):.0f} s: waiting for {view.machine.waiting_for}"
            )
            yield Finding("warning", what, REMEDY, (measured("seconds since the last step", since_s, limit),))
        return
    limit, waiting = (
        max(view.limit("starved.growth") * median(times_s[:-1]), least_s),
        view.lines[-1].get("waiting_share"),
    )
    if times_s[-1] > limit and is_number(waiting) and waiting > view.limit("starved.share"):
        what = f"a step took {times_s[-1]:.0f} s, of which the trainer waited {waiting:.0%}"
        facts = measured("step_s", times_s[-1], limit), measured("waiting_share", waiting, view.limit("starved.share"))
        yield Finding("warning", what, REMEDY, facts)

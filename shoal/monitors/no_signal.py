"""No signal: within groups all rewards are equal, so the work that is paid teaches nothing.

If all are solved, the tasks are too easy; if none is, they are too hard, or the policy does not know the form of an
answer.
"""

from collections.abc import Iterator

from shoal.monitors.view import Finding, View, is_number, measured

METRIC = "zero_signal_share"
EASY = "All are solved: use harder tasks, or difficulty.pools and difficulty.curriculum"
HARD = "Use easier tasks, larger groups (rollouts.group_size), or a better first policy: `shoal sft`"


def look(view: View) -> Iterator[Finding]:
    """At the newest step; between steps, at the groups since the last one with signal."""
    solved = view.series("solve_rate")
    remedy = EASY if solved and solved[-1] > 0.5 else HARD
    if view.machine is not None:
        most = view.limit("no_signal.flat") * view.max_flat_groups
        if view.max_flat_groups and view.machine.flat_groups >= max(1.0, most):
            what = (
                f"the last {view.machine.flat_groups} groups have no signal; at {view.max_flat_groups} the run pauses"
            )
            yield Finding("critical", what, remedy, (measured("groups", view.machine.flat_groups, most),))
        return
    if not view.lines or not is_number(share := view.lines[-1].get(METRIC)):
        return
    limit = view.limit("no_signal.share")
    if share >= limit:
        what = f"{share:.1%} of accepted groups have no signal"
        yield Finding("warning", what, remedy, (measured(METRIC, share, limit),))

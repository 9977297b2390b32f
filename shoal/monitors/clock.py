"""Clock: a worker's clock and the host's differ, or the host's was set back.

Requests are refused when the clocks differ by a minute, so those of a worker whose clock drifts fail before long. If
all workers differ the same way, the host's clock is wrong; a worker that sent only one submission counts there, too, or
two quick keys of one stranger could speak for all. What it cannot see: who is right, if all workers belong to one stranger.
"""

from collections.abc import Iterator
from statistics import median

from shoal.monitors.inputs import LimitExceeded, MonitorInputs, measured

STEPS = 5
"""Newest steps that are looked at."""
LEAST_SUBMISSIONS = 2
BEHIND_S = 5.0
"""The log may be ahead of the host's clock by this: its times do not fall when the clock is corrected a little."""
REMEDY = "Set the clock by NTP (`timedatectl`) on the machine that is named"


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """Between steps, at the host's clock; else at what workers signed in the newest steps."""
    limit = view.limit("clock.seconds")
    if view.machine is not None:
        behind_s = view.machine.log_time - view.machine.now
        if view.machine.log_time and behind_s > BEHIND_S:
            what = f"the host's clock is {behind_s:.0f} s behind the log: it was set back, and leases wait for it"
            yield LimitExceeded("critical", what, REMEDY, (measured("seconds behind the log", behind_s, BEHIND_S),))
        return
    seen = {key: [skew for one in done for skew in one.skews_s] for key, done in view.nodes_of(STEPS).items()}
    skews_s = {key: median(skews) for key, skews in seen.items() if skews}
    off = {key: skew for key, skew in skews_s.items() if abs(skew) > limit and len(seen[key]) >= LEAST_SUBMISSIONS}
    if len(off) > 1 and (min(skews_s.values()) > limit or max(skews_s.values()) < -limit):  # guard: all-clocks-agree
        skew = median(off.values())
        way = "behind" if skew > 0 else "ahead of"
        what = f"the host's clock is about {abs(skew):.0f} s {way} the clocks of all workers"
        yield LimitExceeded("critical", what, REMEDY, (measured("seconds", abs(skew), limit),))
        return
    for key, skew in off.items():
        way = "ahead of" if skew > 0 else "behind"
        what = f"the clock of {view.name_of(key)} is about {abs(skew):.0f} s {way} the host's"
        yield LimitExceeded("warning", what, REMEDY, (measured("seconds", abs(skew), limit),), key)

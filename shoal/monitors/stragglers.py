"""Stragglers: a worker that holds up batches, because it lets its leases lapse or is much slower than the others.

In every batch somebody is last, so waiting alone blames nobody: only a worker that is also slower than the others is
named for it. Forgers are quick, so a worker is compared only with those whose work is accepted. An honest worker may be
slow, so nobody is quarantined for it: the rules lease its blocks to others in time.
"""

from collections.abc import Iterator
from statistics import median

from shoal.monitors.inputs import START_STEPS, LimitExceeded, MonitorInputs, measured

STEPS = 20
"""That are looked at: a slow worker has few leases."""
LEAST_LAPSES, LEAST_SUBMISSIONS, LEAST_OTHERS = 3, 3, 2
LEAST_SECONDS = 0.5
"""A worker that takes less for a group is slow only if batches waited for it."""
REMEDY = (
    "Ask its owner what else the machine does, or kick it. If many lapse, raise rollouts.lease_s, or make blocks smaller "
    "(rollouts.block_rollouts)"
)
ENVIRONMENT_REMEDY = (
    "Correct the environment, which `shoal env check` tries: logs/coordinator.log has the calls. If no other worker meets "
    "them, ask its owner what else the machine does"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At leases and pace of each worker in the newest steps."""
    nodes = view.nodes_of(STEPS)
    times_s = view.series("step_s")[-STEPS:]
    pace_s = {
        key: median(took)
        for key, done in nodes.items()
        if len(took := [second for one in done for second in one.seconds]) >= LEAST_SUBMISSIONS
    }
    accepted = {
        key for key, done in nodes.items() if sum(one.accepted for one in done) > sum(one.refused for one in done)
    }  # guard: pace-is-of-accepted-work
    late_shares = {
        key: min(1.0, sum(one.late for one in done) / leases)
        for key, done in nodes.items()
        if (leases := sum(one.leases for one in done)) >= LEAST_LAPSES
    }
    for key, done in nodes.items():
        leases, stopped = sum(one.leases for one in done), sum(one.stopped for one in done)
        lapsed = sum(one.lapsed for one in done) - stopped
        share, most = lapsed / max(1, leases), view.limit("stragglers.lapsed")
        late = late_shares.get(key, 0.0)
        usual = [one for other, one in late_shares.items() if other != key]
        too_late = max(most, view.limit("stragglers.late") * median(usual)) if usual else 1.0
        others = [took for other, took in pace_s.items() if other != key and other in accepted]
        if lapsed >= LEAST_LAPSES and share > most:
            what = f"{view.name_of(key)} let {lapsed} of its {leases} leases lapse"
            yield LimitExceeded("warning", what, REMEDY, (measured("lapsed share", share, most),), key)
        elif stopped >= max(lapsed, LEAST_LAPSES - lapsed) and (both := (lapsed + stopped) / max(1, leases)) > most:
            what = f"{view.name_of(key)} gave back {stopped} of its {leases} leases because an environment was stopped"
            yield LimitExceeded("warning", what, ENVIRONMENT_REMEDY, (measured("lapsed share", both, most),), key)
        elif len(usual) >= LEAST_OTHERS and late > too_late:
            what = f"{late:.0%} of the leases of {view.name_of(key)} were filled by others first, or became too old"
            yield LimitExceeded("notice", what, REMEDY, (measured("late share", late, too_late),), key)
        elif key in pace_s and len(others) >= LEAST_OTHERS:
            limit = max(view.limit("stragglers.slow") * median(others), LEAST_SECONDS)
            if pace_s[key] > limit:
                what = f"{view.name_of(key)} takes {pace_s[key]:.3g} s for a group, the others {median(others):.3g} s"
                yield LimitExceeded("notice", what, REMEDY, (measured("seconds a group", pace_s[key], limit),), key)
            elif len(times_s) >= START_STEPS and pace_s[key] > view.limit("stragglers.held_slow") * median(others):
                yield from _held(view, key, sum(one.held_s for one in done) / max(1e-9, sum(times_s)), pace_s[key])


def _held(view: MonitorInputs, key: str, share: float, pace_s: float) -> Iterator[LimitExceeded]:
    """A worker that is slower than others, if batches waited for it."""
    most = view.limit("stragglers.held")
    if share > most:
        waited = f"batches waited {share:.0%} of the time for {view.name_of(key)} alone"
        what = f"{waited}, which takes {pace_s:.3g} s for a group"
        yield LimitExceeded("notice", what, REMEDY, (measured("held share", share, most),), key)

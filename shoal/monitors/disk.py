"""Disk: the disk of the run's folder, or the run's own quota, is full or will be soon.

At a full disk the run stops granting leases and waits: nothing is lost, but nothing is learned. The time left is
the same, whether shoal or another program fills the disk.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, median_low

from shoal.monitors.inputs import LimitExceeded, MonitorInputs, measured

LEAST_SAMPLES, LEAST_S = 10, 600.0
"""A rate needs so many looks over so long: a checkpoint is written in one piece."""
HELD_S = 300.0
"""The rate must hold for so long: what another program writes for some minutes fills no disk."""
PARTS = 4
REMEDY = "Free space, lower storage.window_steps by --set, or raise storage.checkpoint_every"
QUOTA = (
    "Raise storage.quota_mb, or lower storage.window_steps by --set: if deleting what is old makes no room, no lease is "
    "granted"
)


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At the free space now, its rate, and the quota."""
    machine = view.machine
    if machine is None:
        return
    if machine.disk:
        free_mb, least_mb = machine.disk[-1][1] / 1e6, view.limit("disk.free_mb")
        hours, least = _held(machine.disk), view.limit("disk.hours")
        if free_mb < least_mb:
            what = f"the disk of the run's folder has {free_mb:.0f} MB free"
            yield LimitExceeded("critical", what, REMEDY, (measured("free MB", free_mb, least_mb),))
        elif hours < least:
            what = f"the disk is full in {hours:.1f} h at this rate"
            yield LimitExceeded("warning", what, REMEDY, (measured("hours", hours, least),))
    share, most = machine.quota_share, view.limit("disk.quota")
    if share >= most:
        yield LimitExceeded(
            "warning", f"{share:.1%} of the run's quota is used", QUOTA, (measured("quota share", share, most),)
        )


def _held(disk: Sequence[tuple[float, float]]) -> float:
    """The most hours that were left at any look of the last HELD_S."""
    newest = disk[-1][0]
    return max(hours_left(disk[: i + 1]) for i, (time, _) in enumerate(disk) if newest - time <= HELD_S)


def hours_left(disk: Sequence[tuple[float, float]]) -> float:
    """Until the disk is full; infinite if it is not being filled, or if too little is known.

    The looks are divided into four parts. The rate is the median of those between the medians of neighbouring parts: one
    large file makes no rate, not even one that comes in the middle of a part, and files that come again and again do.
    """
    if len(disk) < LEAST_SAMPLES or disk[-1][0] - disk[0][0] < LEAST_S:
        return float("inf")
    cuts = [round(part * len(disk) / PARTS) for part in range(PARTS + 1)]
    parts = [disk[first:last] for first, last in pairwise(cuts)]
    middles = [(median(time for time, _ in part), median_low(free for _, free in part)) for part in parts]
    filled_per_s = -median((b[1] - a[1]) / max(1.0, b[0] - a[0]) for a, b in pairwise(middles))
    return disk[-1][1] / filled_per_s / 3600 if filled_per_s > 0 else float("inf")

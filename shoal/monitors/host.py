"""Monitors of the host: a full disk, a trainer that waits, and slow publishing."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, median_low

from shoal.ledger.remedies import NO_LEASE, QUOTA, RAISE_QUOTA, WORKER_REMEDY
from shoal.monitors.monitor_inputs import LEAST_STEPS, LimitExceeded, Machine, MonitorInputs, measured
from shoal.step_metrics import is_number

# --- disk ---

LEAST_SAMPLES, LEAST_SAMPLES_S = 10, 600.0
"""A rate needs so many looks over so long: a checkpoint is written in one piece."""
RATE_HELD_S = 300.0
"""The rate must hold for so long: what another program writes for some minutes fills no disk."""
PARTS = 4
DISK_REMEDY = "Free space, lower storage.window_steps by --set, or raise storage.checkpoint_every"
QUOTA_REMEDY = (
    "Raise storage.quota_mb, or lower storage.window_steps by --set: if deleting what is old makes no room, no lease is "
    "granted"
)


def disk(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """The disk of the run's folder, or the run's own quota, is full or will be soon.

    At a full disk the run stops granting leases and waits: nothing is lost, but nothing is learned. The time left is the
    same, whether shoal or another program fills the disk.
    """
    machine = view.machine
    if machine is None:
        return
    if machine.disk:
        free_mb, least_mb = machine.disk[-1][1] / 1e6, view.limit("disk.free_mb")
        hours, least = _longest_hours_left(machine.disk), view.limit("disk.hours")
        if free_mb < least_mb:
            what = f"the disk of the run's folder has {free_mb:.0f} MB free"
            yield LimitExceeded("critical", what, DISK_REMEDY, (measured("free MB", free_mb, least_mb),))
        elif hours < least:
            what = f"the disk is full in {hours:.1f} h at this rate"
            yield LimitExceeded("warning", what, DISK_REMEDY, (measured("hours", hours, least),))
    share, most = machine.quota_share, view.limit("disk.quota")
    if share >= most:
        what = f"{share:.1%} of the run's quota is used"
        yield LimitExceeded("warning", what, QUOTA_REMEDY, (measured("quota share", share, most),))


def _longest_hours_left(disk: Sequence[tuple[float, float]]) -> float:
    """The most hours that were left at any look of the last RATE_HELD_S."""
    newest = disk[-1][0]
    return max(hours_left(disk[: i + 1]) for i, (time, _) in enumerate(disk) if newest - time <= RATE_HELD_S)


def hours_left(disk: Sequence[tuple[float, float]]) -> float:
    """Until the disk is full; infinite if it is not being filled, or if too little is known.

    The looks are divided into four parts. The rate is the median of those between the medians of neighbouring parts: one
    large file makes no rate, not even one that comes in the middle of a part, and files that come again and again do.
    """
    if len(disk) < LEAST_SAMPLES or disk[-1][0] - disk[0][0] < LEAST_SAMPLES_S:
        return float("inf")
    cuts = [round(part * len(disk) / PARTS) for part in range(PARTS + 1)]
    parts = [disk[first:last] for first, last in pairwise(cuts)]
    middles = [(median(time for time, _ in part), median_low(free for _, free in part)) for part in parts]
    filled_per_s = -median((b[1] - a[1]) / max(1.0, b[0] - a[0]) for a, b in pairwise(middles))
    return disk[-1][1] / filled_per_s / 3600 if filled_per_s > 0 else float("inf")


# --- starved ---

REMEDIES = {
    "the trainer": "It may be at work, or stopped: see its process and logs/trainer.log",
    "validators": "See that they run, or admit another: `shoal admin admit RUN KEY`",
    "the host": "The run goes on when its host has done that",
}
"""By what the run waits for, as its status begins."""

WORKERS = "workers", "other workers"
"""How a wait for them begins."""

LEASED = "Late groups go to others by themselves. More may join: `shoal join URL`"
UNLEASED = "No group is leased. More workers may join: `shoal join URL`"

PAST = (
    "It is over: `shoal watch RUN` says what the run waits for now, and logs/launcher.log which of the host's processes "
    "died meanwhile"
)
"""Of a step that has ended. The metrics do not say for whom the trainer waited."""


def starved(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """The trainer waits, and steps take far longer than this run's usual ones.

    A trainer waits in every run, since sampling takes longer than learning; only a change is an alarm. Workers left or are
    quarantined, a validator or the trainer hangs, or the coordinator is away: between steps the text says what is known.
    """
    times_s = view.series("step_s")
    if len(times_s) < LEAST_STEPS:
        return
    least_s = view.limit("starved.seconds")
    if (machine := view.machine) is not None:
        limit = max(view.limit("starved.growth") * median(times_s), least_s)
        since_s = machine.now - machine.step_began
        if machine.running and machine.step_began and since_s > limit:
            cause = machine.notice or _waits(view, machine)
            what = f"no step for {since_s:.0f} s, usually {_brief_s(median(times_s))} s"
            # who is waited for comes first: it is what a small terminal has room for
            what = f"{what}: {cause}" if _is_past(machine) else f"{cause}; {what}"
            waited = measured("seconds since the last step", since_s, limit)
            yield LimitExceeded("warning", what, _remedy(machine), (waited,))
        return
    limit = max(view.limit("starved.growth") * median(times_s[:-1]), least_s)
    waiting = view.lines[-1].get("waiting_share")
    if times_s[-1] > limit and is_number(waiting) and waiting > view.limit("starved.share"):
        what = f"a step took {times_s[-1]:.0f} s, of which the trainer waited {waiting:.0%}{_meanwhile(view)}"
        facts = measured("step_s", times_s[-1], limit), measured("waiting_share", waiting, view.limit("starved.share"))
        yield LimitExceeded("warning", what, PAST, facts)


def _brief_s(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1g}"


def _is_past(machine: Machine) -> bool:
    """Whether what took most of the time is over."""
    return bool(machine.longest) and machine.longest.partition(":")[0] != machine.waiting_for.partition(":")[0]


def _waits(view: MonitorInputs, machine: Machine) -> str:
    """What took most of the time."""
    who, colon, rest = _blamed(machine)[0].removesuffix(".").partition(": ")
    said = f"waiting for {who}{colon}{_whose(view, machine)}{rest}"
    return f"of these, {machine.longest_s:.0f} s {said}" if _is_past(machine) else said


def _blamed(machine: Machine) -> tuple[str, str]:
    """What is blamed, and what to do about it."""
    return (machine.longest, machine.longest_remedy) if machine.longest else (machine.waiting_for, machine.remedy)


def _whose(view: MonitorInputs, machine: Machine) -> str:
    """Whose leases are the oldest, if workers are waited for and the status does not say who is silent."""
    blamed, remedy = _blamed(machine)
    if not blamed.startswith(WORKERS) or NO_LEASE in blamed or remedy == WORKER_REMEDY:
        return ""
    whose = ", ".join(f"{view.name_of(key)} {machine.now - since:.0f} s" for key, since in view.leased)
    return f"leased longest: {whose}; " if whose else ""


def _remedy(machine: Machine) -> str:
    """What to do about what the run has waited for longest."""
    if machine.notice:
        return "The run goes on by itself after that"
    blamed, remedy = _blamed(machine)
    if remedy:
        return remedy
    if QUOTA in blamed:
        return RAISE_QUOTA
    if not blamed.startswith(WORKERS):
        return REMEDIES.get(blamed.partition(":")[0], "The logs of the host's roles say more")
    return LEASED if machine.in_flight else UNLEASED


def _meanwhile(view: MonitorInputs) -> str:
    """What the log says of workers in the newest step, if anything was lost."""
    nodes = view.steps[-1].nodes.values() if view.steps else ()
    counts = {"leases lapsed": sum(n.lapsed for n in nodes), "blocks were refused": sum(n.refused for n in nodes)}
    lost = [f"{count} {what}" for what, count in counts.items() if count]
    return f"; meanwhile {' and '.join(lost)}" if lost else ""


# --- publishing ---

PUBLISHING_REMEDY = (
    "Train an adapter (policy.adapter) or publish bfloat16, which has half of the bytes; use a faster disk; or learn more "
    "per step (rollouts.batch_groups)"
)


def publishing(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """Steps wait until the version before is written, signed and announced.

    It is done beside the next step, so it costs nothing until it takes longer than that step.
    """
    line = view.lines[-1] if view.lines else {}
    took_s, waited_s, step_s = (line.get(name) for name in ("publish_s", "publish_wait_s", "step_s"))
    if not (is_number(took_s) and is_number(waited_s) and is_number(step_s) and step_s):
        return
    share, most = waited_s / step_s, view.limit("publishing.share")
    if took_s > view.limit("publishing.seconds") and share > most:
        what = f"publishing takes {took_s:.0f} s, and {share:.0%} of a step is spent waiting for it"
        yield LimitExceeded("warning", what, PUBLISHING_REMEDY, (measured("publish_wait_s/step_s", share, most),))

"""Starved: the trainer waits, and steps take far longer than this run's usual ones.

A trainer waits in every run, since sampling takes longer than learning; only a change is an alarm. Workers left or are
quarantined, a validator or the trainer hangs, or the coordinator is away: between steps the text says what is known.
"""

from collections.abc import Iterator
from statistics import median

from shoal.ledger.hints import NO_LEASE, QUOTA, RAISE_QUOTA, WORKER_REMEDY, split_remedy
from shoal.monitors.inputs import LEAST_STEPS, LimitExceeded, Machine, MonitorInputs, is_number, measured

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


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At the newest step's time; between steps, at the time since the last one."""
    times_s = view.series("step_s")
    if len(times_s) < LEAST_STEPS:
        return
    least_s = view.limit("starved.seconds")
    if view.machine is not None:
        limit = max(view.limit("starved.growth") * median(times_s), least_s)
        since_s = view.machine.now - view.machine.step_began
        if view.machine.running and view.machine.step_began and since_s > limit:
            cause = view.machine.notice or _waits(view, view.machine)
            what = f"no step for {since_s:.0f} s, usually {_brief_s(median(times_s))} s"
            # who is waited for comes first: it is what a small terminal has room for
            what = f"{what}: {cause}" if _is_past(view.machine) else f"{cause}; {what}"
            yield LimitExceeded(
                "warning", what, _remedy(view.machine), (measured("seconds since the last step", since_s, limit),)
            )
        return
    limit, waiting = (
        max(view.limit("starved.growth") * median(times_s[:-1]), least_s),
        view.lines[-1].get("waiting_share"),
    )
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
    who, colon, rest = split_remedy(_blamed(machine))[0].removesuffix(".").partition(": ")
    said = f"waiting for {who}{colon}{_whose(view, machine)}{rest}"
    return f"of these, {machine.longest_s:.0f} s {said}" if _is_past(machine) else said


def _blamed(machine: Machine) -> str:
    return machine.longest or machine.waiting_for


def _whose(view: MonitorInputs, machine: Machine) -> str:
    """Whose leases are the oldest, if workers are waited for and the status does not say who is silent."""
    blamed = _blamed(machine)
    if not blamed.startswith(WORKERS) or NO_LEASE in blamed or WORKER_REMEDY in blamed:
        return ""
    whose = ", ".join(f"{view.name_of(key)} {machine.now - since:.0f} s" for key, since in view.leased)
    return f"leased longest: {whose}; " if whose else ""


def _remedy(machine: Machine) -> str:
    """What to do about what the run has waited for longest."""
    if machine.notice:
        return "The run goes on by itself after that"
    blamed = _blamed(machine)
    if remedy := split_remedy(blamed)[1]:
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

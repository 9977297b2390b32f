"""`[monitors]` of a run file: what the monitors may do by themselves, and their limits with the reason for each."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from shoal.protocol.field_types import NonNegative, OpenShare
from shoal.protocol.messages import LrFactor
from shoal.terminal import docs_page
from shoal.typed_toml import Section

Action = Literal["pause", "lower_rate", "quarantine"]


class MonitorsConfig(Section, frozen=True):
    """What watches the run, and what it may do by itself. Without it, alarms are shown and nothing else happens."""

    enabled: bool = True
    """Whether the launcher evaluates the monitors."""
    actions: dict[str, Action] = {}
    """By the name of an alarm: pause the run; multiply the learning rate by `lr_factor`; or, of poisoning alone,
    quarantine a worker for an hour whose groups are refused. Done once for each alarm, by a signed request whose evidence
    is in the log."""
    lr_factor: OpenShare = 0.5
    """What `lower_rate` multiplies the learning rate by, each time."""
    least_lr_factor: LrFactor = 0.1
    """`lower_rate` never brings the learning rate below this share of the run file's."""
    limits: dict[str, NonNegative] = {}
    """Limits other than the usual ones, by their names."""


class Limit(NamedTuple):
    """A limit of a monitor."""

    value: float
    unit: str
    reason: str
    """What it means, and why it is so."""


CAUSES = {
    "drift": "the policy that samples and the one that learns give other probabilities",
    "collapse": "reward, solve rate or gradient show that the policy is being destroyed",
    "entropy": "the policy has become certain without solving its tasks",
    "hacking": "reward rises while length, repetition, solve rate, held-out tasks or a held-out judge say otherwise",
    "poisoning": "many of a worker's groups are refused, or few where its influence is large, or its rewards differ from "
    "others' on like tasks",
    "stragglers": "a worker lets leases lapse, or is far slower than the others",
    "validators": "validators disagree about the same work",
    "no_signal": "rewards within groups are all equal, so nothing can be learned",
    "disk": "the disk, or the quota of the run, will be full soon",
    "clock": "the clocks of host and workers differ",
    "starved": "steps take far longer than usual, because the trainer waits",
    "publishing": "publishing a version takes as long as making it",
}
"""Alarms by name, each with what it says."""


def said_of(cause: str) -> str:
    """What an alarm says to anyone, beginning with a capital letter. It may be an alarm of a later version."""
    said = CAUSES.get(cause, "this version of shoal does not know the alarm")
    return said[:1].upper() + said[1:]


NAMES_A_NODE = ("poisoning",)
"""Alarms for which a worker may be quarantined: being slow is no fault, and nor is a wrong clock."""

LIMITS: dict[str, Limit] = {
    "drift.nats": Limit(
        0.3, "nats",
        "Mean |log-prob under the trained policy - under the one that sampled|, over 3 of 5 steps. Honest steps of small "
        "policies stay below 0.15; a trainer with half of the temperature has 0.5",
    ),
    "drift.growth": Limit(
        8.0, "times", "The same against the median of the steps before. It doubles when staleness does; 8 is no noise"
    ),
    "drift.floor_nats": Limit(0.1, "nats", "Growth below this does not matter: clipping bounds what follows from it"),
    "drift.selfcheck_nats": Limit(
        0.1, "nats",
        "Largest difference when one completion is computed again at start-up. bfloat16 rounds by less; int8 is not judged",
    ),
    "collapse.share": Limit(
        0.5, "share", "Of what the run has gained since its start, lost again: noise and harder tasks take less"
    ),
    "collapse.noises": Limit(
        3.0, "deviations", "The loss must also be this many robust standard deviations of a step's mean reward"
    ),
    "collapse.best": Limit(
        0.2, "share", "Of the best reward, lost as well: where reward hardly rises, half of what it gained is noise"
    ),
    "collapse.grad_growth": Limit(
        30.0, "times",
        "Norm of the gradient against its own median. Single steps reach 10 times; 3 of 5 at 30 do not happen"
    ),
    "collapse.grad_norm": Limit(
        10.0, "norm", "Growth below this does not matter, because the gradient is clipped (train.max_grad_norm)"
    ),
    "collapse.solved": Limit(0.1, "share", "A solve rate that was above this once and is 0 over 5 steps has collapsed"),
    "entropy.share": Limit(
        0.1, "share",
        "Of the entropy at the start. A policy that masters its tasks goes lower, so the next limit counts too"
    ),
    "entropy.solved": Limit(
        0.6, "share", "Above this solve rate, certainty is success. Below it, groups soon have no signal"
    ),
    "hacking.reward_noises": Limit(
        2.0, "deviations",
        "By how much reward must have risen, since the start or the best evaluation, in robust standard deviations of a "
        "step's mean reward",
    ),
    "hacking.length": Limit(
        1.5, "times",
        "Policy tokens of a rollout, against the start. Honest reasoning grows by more, so the next limit counts too"
    ),
    "hacking.correlation": Limit(
        0.8, "correlation",
        "Within groups, between reward and length. Games that last longer when they are won reach 0.7, an environment that "
        "pays for length 0.95",
    ),
    "hacking.repetition": Limit(
        0.3, "share", "By how much the share of repeated 4-grams may rise. Honest text of small policies moves by 0.1"
    ),
    "hacking.solved_fall": Limit(
        0.15, "share", "By how much the solve rate falls while reward rises. Partial rewards move it by less"
    ),
    "poisoning.refused": Limit(
        0.2, "share", "Of a worker's judged blocks, refused, over 40 steps. Honest machines are refused 1 group in 1,000"
    ),
    "poisoning.blocks": Limit(
        3.0, "blocks", "Refused ones, at least; one fewer if none was accepted. Fewer may be a bad start of a machine"
    ),
    "poisoning.false_influence": Limit(
        0.01, "share",
        "A worker's share of the influence on batches, times the lower 95 % end of its refused share. An honest one that "
        "makes all the work and is refused 1 block in 1,000 has 0.001 at most",
    ),
    "poisoning.lean": Limit(
        6.0, "deviations",
        "Of a worker's mean reward from the others' of the same steps. Tasks are drawn, so honest ones differ by chance; "
        "6 happens once in 10^9",
    ),
    "poisoning.lean_groups": Limit(12.0, "groups", "That the last limit needs of the worker and of the others"),
    "stragglers.lapsed": Limit(
        0.5, "share",
        "Of a worker's leases of 20 steps, at least 3, that lapsed. Leases filled too late count only where "
        "stragglers.late is exceeded too",
    ),
    "stragglers.late": Limit(
        2.0, "times", "Share of leases filled too late, against the others' median: where all are late, nobody is slow"
    ),
    "stragglers.slow": Limit(
        5.0, "times", "Seconds a group, against the median of the other workers. Machines of one run often differ by 3"
    ),
    "stragglers.held": Limit(
        0.15, "share",
        "Of the time of 20 steps, in which batches waited for blocks of this worker alone. Somebody is always last: among "
        "equal workers one may reach 0.3, so the next limit counts too",
    ),
    "stragglers.held_slow": Limit(
        3.0, "times", "Seconds a group, against the median of the others, of a worker for which batches waited"
    ),
    "validators.differences": Limit(3.0, "verdicts", "On the same groups that differ, over 20 steps; one may be a restart"),
    "validators.share": Limit(0.1, "share", "Of a validator's verdicts that can be compared, those that differ"),
    "validators.beside": Limit(
        1.5, "times",
        "Differing share against the median of two others or more. A liar differs from all others, and these "
        "differ from the liar alone",
    ),
    "no_signal.share": Limit(
        0.9, "share",
        "Of accepted groups without signal, over 4 of 6 steps: nine in ten are paid in vain",
    ),
    "no_signal.flat": Limit(
        0.5, "share",
        "Of rollouts.max_flat_groups, in a row without signal, at which the host is told",
    ),
    "disk.hours": Limit(6.0, "hours", "Until the disk is full, at the median rate of an hour, for 5 min: a night's sleep"),
    "disk.free_mb": Limit(500.0, "MB", "Free space: below it a checkpoint may not fit"),
    "disk.quota": Limit(0.97, "share", "Of storage.quota_mb in use. At 1, no lease is granted"),
    "clock.seconds": Limit(
        20.0, "seconds", "Between a worker's clock and the host's. Requests are refused at 60; an upload takes some seconds"
    ),
    "starved.growth": Limit(4.0, "times", "Time of a step against the median of the run, in 3 of 5 steps"),
    "starved.share": Limit(0.8, "share", "Of that time, waiting: else the trainer itself is slow"),
    "starved.seconds": Limit(30.0, "seconds", "Steps shorter than this are never called slow"),
    "publishing.share": Limit(0.3, "share", "Of a step, waiting for the version before to be published, in 5 of 8 steps"),
    "publishing.seconds": Limit(5.0, "seconds", "A shorter time to publish is never called slow"),
}  # fmt: skip
"""Limits by name: what precedes the dot is the alarm."""


def monitors_fit(monitors: MonitorsConfig) -> Iterator[tuple[bool, str]]:
    """What must hold, each with the sentence for a run file in which it does not."""
    for cause, action in monitors.actions.items():
        known = ", ".join(CAUSES)
        yield cause in CAUSES, f"monitors.actions.{cause}: there is no such alarm. The alarms are {known}"
        yield (
            action != "quarantine" or cause in NAMES_A_NODE,
            f'monitors.actions.{cause} = "quarantine": only poisoning is evidence against a worker. Use "pause" there',
        )
    for name in monitors.limits:
        page = docs_page("docs/reference/alarms.md")
        yield name in LIMITS, f"monitors.limits.{name!r}: there is no such limit: {page} lists them"

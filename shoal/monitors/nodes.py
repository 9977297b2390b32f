"""Monitors of nodes: poisoning, stragglers, disagreeing validators and wrong clocks, from the log's digests of steps."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from shoal.monitors.monitor_inputs import START_STEPS, LimitExceeded, MonitorInputs, measured
from shoal.monitors.step_statistics import NodeStep, StepDigest

# --- poisoning ---

POISONING_STEPS = 40
"""That are looked at: a worker that is refused is quarantined, so it sends little."""
Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""
NAMED_BY = 12
"""Digits of its key that name a worker in commands."""


def poisoning_remedy(key: str) -> str:
    """What to do about a worker."""
    node = key[:NAMED_BY]
    return (
        f"See its refusals (`shoal credits RUN {node}`) and audit its groups (`shoal audit RUN`). "
        f"`shoal admin quarantine RUN {node}` stops it for an hour, `shoal admin kick RUN {node}` for good"
    )


def poisoning(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """A worker steers the policy by groups that others do not confirm.

    Three signs. Validators refuse much of what it sends. They refuse little, but more than honest machines are, of a worker
    with much influence. Or the rewards of its accepted groups lean away from those of the others, though tasks are drawn
    for all alike: it forges what no audit sees, or drops the tasks it does not like. Only the first, which is critical,
    leads to a quarantine: where cheats make most groups, the rewards of honest workers lean more than theirs. What it
    cannot see: a worker whose forgeries have the usual rewards and are never refused.

    The second sign is an inequality. If a share r of a worker's judged blocks is refused, and audits see some of its work
    alone, about as much of what was accepted is false as of what was seen: the false part of the influence on batches is
    about r times its share s. So r * s may be at most the limit "poisoning.false_influence". The r that is used is the
    lower end of its 95 % interval (Wilson), so that few refusals of few blocks are no evidence; a worker without refusals
    has r = 0 and passes however large s is.
    """
    nodes = view.nodes_of(POISONING_STEPS)
    influence = sum(one.influence for done in nodes.values() for one in done)
    leaning = leans(view.steps[-POISONING_STEPS:], int(view.limit("poisoning.lean_groups")))
    for key, done in nodes.items():
        share = sum(one.influence for one in done) / influence if influence else 0.0
        found = (
            _refused(view, key, done, share)
            or _influential(view, key, done, share)
            or _leaning(view, key, leaning.get(key, 0.0), share)
        )
        if found is not None:
            yield found


def _refused(view: MonitorInputs, key: str, done: Sequence[NodeStep], share: float) -> LimitExceeded | None:
    refused, accepted = sum(one.refused for one in done), sum(one.accepted for one in done)
    most = view.limit("poisoning.refused")
    least = view.limit("poisoning.blocks") - (not accepted)
    if refused < max(1, least) or refused / (refused + accepted) <= most:
        return None
    rate = refused / (refused + accepted)
    what = f"{view.name_of(key)} had {rate:.1%} of its blocks refused, and {share:.1%} of the influence on batches"
    return LimitExceeded("critical", what, poisoning_remedy(key), (measured("refused share", rate, most),), key)


def _influential(view: MonitorInputs, key: str, done: Sequence[NodeStep], share: float) -> LimitExceeded | None:
    """Influence against agreement: what of the influence on batches is likely to be false."""
    refused, accepted = sum(one.refused for one in done), sum(one.accepted for one in done)
    most = view.limit("poisoning.false_influence")
    if refused < view.limit("poisoning.blocks"):
        return None
    likely = lowest_share(refused, refused + accepted)  # guard: influence-against-agreement
    if likely * share <= most:
        return None
    what = (
        f"{view.name_of(key)} has {share:.1%} of the influence on batches, and {refused} of its "
        f"{refused + accepted} blocks were refused"
    )
    return LimitExceeded(
        "warning", what, poisoning_remedy(key), (measured("influence x refused share", likely * share, most),), key
    )


def lowest_share(hits: int, tried: int) -> float:
    """The lower end of the 95 % interval of a share: Wilson's score interval (J. Am. Stat. Assoc. 22, 1927)."""
    if not hits:
        return 0.0
    rate, z2 = hits / tried, Z95**2
    centre, half = rate + z2 / (2 * tried), Z95 * math.sqrt(rate * (1 - rate) / tried + z2 / (4 * tried**2))
    return max(0.0, (centre - half) / (1 + z2 / tried))


def _leaning(view: MonitorInputs, key: str, lean: float, share: float) -> LimitExceeded | None:
    most = view.limit("poisoning.lean")
    if abs(lean) <= most:
        return None
    way = "above" if lean > 0 else "below"
    what = f"rewards of {view.name_of(key)} are {abs(lean):.1f} deviations {way} those of others on like tasks"
    what += f", and it has {share:.1%} of the influence on batches"
    return LimitExceeded("warning", what, poisoning_remedy(key), (measured("reward lean", abs(lean), most),), key)


class _Rewards(NamedTuple):
    """Mean rewards of groups of one step."""

    groups: int
    total: float
    squares: float


def leans(steps: Sequence[StepDigest], least: int) -> dict[str, float]:
    """By worker: by how many standard deviations its mean reward differs from the others', compared within each step. None
    for a worker with fewer than `least` groups, or whose others have fewer."""
    above, variance = dict[str, float](), dict[str, float]()
    own_groups, other_groups = Counter[str](), Counter[str]()
    for step in steps:
        nodes = {key: _rewards(node.rewards) for key, node in step.nodes.items() if key and node.rewards}
        count = sum(one.groups for one in nodes.values())
        total, squares = sum(one.total for one in nodes.values()), sum(one.squares for one in nodes.values())
        spread = max(squares / count - (total / count) ** 2, 1e-12) if count else 0.0
        for key, own in nodes.items():
            others = count - own.groups
            own_groups[key] += own.groups
            other_groups[key] += others
            if others > 1:
                above[key] = above.get(key, 0.0) + own.total - own.groups * (total - own.total) / others
                variance[key] = variance.get(key, 0.0) + spread * own.groups * (1 + own.groups / others)
    return {
        key: above[key] / math.sqrt(variance[key])
        for key in above
        if min(own_groups[key], other_groups[key]) >= least and variance[key] > 1e-9
    }


def _rewards(values: Sequence[float]) -> _Rewards:
    return _Rewards(len(values), sum(values), sum(value * value for value in values))


# --- stragglers ---

STRAGGLERS_STEPS = 20
"""That are looked at: a slow worker has few leases."""
LEAST_LAPSES, LEAST_SUBMISSIONS, LEAST_OTHERS = 3, 3, 2
LEAST_SECONDS = 0.5
"""A worker that takes less for a group is slow only if batches waited for it."""
STRAGGLERS_REMEDY = (
    "Ask its owner what else the machine does, or kick it. If many lapse, raise rollouts.lease_s, or make blocks smaller "
    "(rollouts.block_rollouts)"
)
STOPPED_ENVIRONMENT_REMEDY = (
    "Correct the environment, which `shoal env check` tries: logs/coordinator.log has the calls. If no other worker meets "
    "them, ask its owner what else the machine does"
)


def stragglers(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """A worker that holds up batches, because it lets its leases lapse or is much slower than the others.

    In every batch somebody is last, so waiting alone blames nobody: only a worker that is also slower than the others is
    named for it. Forgers are quick, so a worker is compared only with those whose work is accepted. An honest worker may be
    slow, so nobody is quarantined for it: the rules lease its blocks to others in time.
    """
    nodes = view.nodes_of(STRAGGLERS_STEPS)
    times_s = view.series("step_s")[-STRAGGLERS_STEPS:]
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
            yield LimitExceeded("warning", what, STRAGGLERS_REMEDY, (measured("lapsed share", share, most),), key)
        elif stopped >= max(lapsed, LEAST_LAPSES - lapsed) and (both := (lapsed + stopped) / max(1, leases)) > most:
            what = f"{view.name_of(key)} gave back {stopped} of its {leases} leases because an environment was stopped"
            yield LimitExceeded(
                "warning", what, STOPPED_ENVIRONMENT_REMEDY, (measured("lapsed share", both, most),), key
            )
        elif len(usual) >= LEAST_OTHERS and late > too_late:
            what = f"{late:.0%} of the leases of {view.name_of(key)} were filled by others first, or became too old"
            yield LimitExceeded("notice", what, STRAGGLERS_REMEDY, (measured("late share", late, too_late),), key)
        elif key in pace_s and len(others) >= LEAST_OTHERS:
            limit = max(view.limit("stragglers.slow") * median(others), LEAST_SECONDS)
            if pace_s[key] > limit:
                what = f"{view.name_of(key)} takes {pace_s[key]:.3g} s for a group, the others {median(others):.3g} s"
                yield LimitExceeded(
                    "notice", what, STRAGGLERS_REMEDY, (measured("seconds a group", pace_s[key], limit),), key
                )
            elif len(times_s) >= START_STEPS and pace_s[key] > view.limit("stragglers.held_slow") * median(others):
                yield from _held(view, key, sum(one.held_s for one in done) / max(1e-9, sum(times_s)), pace_s[key])


def _held(view: MonitorInputs, key: str, share: float, pace_s: float) -> Iterator[LimitExceeded]:
    """A worker that is slower than others, if batches waited for it."""
    most = view.limit("stragglers.held")
    if share > most:
        waited = f"batches waited {share:.0%} of the time for {view.name_of(key)} alone"
        what = f"{waited}, which takes {pace_s:.3g} s for a group"
        yield LimitExceeded("notice", what, STRAGGLERS_REMEDY, (measured("held share", share, most),), key)


# --- validators ---

VALIDATORS_STEPS = 20
"""That are looked at: only some submissions are judged twice."""
VALIDATORS_REMEDY = (
    "Compute the same groups yourself: `shoal audit RUN`. Then `shoal admin kick` the validator that is wrong, or measure "
    "bounds for its engine with `shoal calibrate`"
)


def validators(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """Two judged the same work differently. One of them lies, or computes differently.

    The log names validators that were outvoted; this names one as soon as it differs from several, and both if there are
    only two.
    """
    nodes = view.nodes_of(VALIDATORS_STEPS)
    differed = {key: sum(one.differed for one in done) for key, done in nodes.items()}
    compared = {key: sum(one.compared for one in done) for key, done in nodes.items()}
    shares = {key: differed[key] / count for key, count in compared.items() if count}
    least, most = view.limit("validators.differences"), view.limit("validators.share")
    beside = view.limit("validators.beside")
    for key in nodes:
        faults = sum(one.faults for one in nodes[key])
        if faults:
            what = f"validator {view.name_of(key)} was outvoted, or judged without doing the work, {faults} times"
            yield LimitExceeded("critical", what, VALIDATORS_REMEDY, (measured("faults", faults, 0.0),), key)
        elif differed[key] >= least and shares[key] > most:
            others = [share for other, share in shares.items() if other != key]
            if len(others) > 1 and shares[key] <= beside * median(others):
                continue  # it differs from the one that differs from all
            counts = f"{differed[key]} of {compared[key]} verdicts"
            what = f"validator {view.name_of(key)} disagreed with others on {counts}"
            yield LimitExceeded(
                "warning", what, VALIDATORS_REMEDY, (measured("differing share", shares[key], most),), key
            )


# --- clock ---

CLOCK_STEPS = 5
"""Newest steps that are looked at."""
CLOCK_SUBMISSIONS = 2
BEHIND_S = 5.0
"""The log may be ahead of the host's clock by this: its times do not fall when the clock is corrected a little."""
CLOCK_REMEDY = "Set the clock by NTP (`timedatectl`) on the machine that is named"


def clock(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """A worker's clock and the host's differ, or the host's was set back.

    Requests are refused when the clocks differ by a minute, so those of a worker whose clock drifts fail before long. If
    all workers differ the same way, the host's clock is wrong; a worker that sent only one submission counts there, too, or
    two quick keys of one stranger could speak for all. What it cannot see: who is right, if all workers belong to one
    stranger.
    """
    limit = view.limit("clock.seconds")
    if view.machine is not None:
        behind_s = view.machine.log_time - view.machine.now
        if view.machine.log_time and behind_s > BEHIND_S:
            what = f"the host's clock is {behind_s:.0f} s behind the log: it was set back, and leases wait for it"
            yield LimitExceeded(
                "critical", what, CLOCK_REMEDY, (measured("seconds behind the log", behind_s, BEHIND_S),)
            )
        return
    seen = {key: [skew for one in done for skew in one.skews_s] for key, done in view.nodes_of(CLOCK_STEPS).items()}
    skews_s = {key: median(skews) for key, skews in seen.items() if skews}
    off = {key: skew for key, skew in skews_s.items() if abs(skew) > limit and len(seen[key]) >= CLOCK_SUBMISSIONS}
    if len(off) > 1 and (min(skews_s.values()) > limit or max(skews_s.values()) < -limit):  # guard: all-clocks-agree
        skew = median(off.values())
        way = "behind" if skew > 0 else "ahead of"
        what = f"the host's clock is about {abs(skew):.0f} s {way} the clocks of all workers"
        yield LimitExceeded("critical", what, CLOCK_REMEDY, (measured("seconds", abs(skew), limit),))
        return
    for key, skew in off.items():
        way = "ahead of" if skew > 0 else "behind"
        what = f"the clock of {view.name_of(key)} is about {abs(skew):.0f} s {way} the host's"
        yield LimitExceeded("warning", what, CLOCK_REMEDY, (measured("seconds", abs(skew), limit),), key)

"""Poisoning: a worker steers the policy by groups that others do not confirm.

Three signs. Validators refuse much of what it sends. They refuse little, but more than honest machines are, of a worker
with much influence. Or the rewards of its accepted groups lean away from those of the others, though tasks are drawn for
all alike: it forges what no audit sees, or drops the tasks it does not like. Only the first, which is critical, leads to a
quarantine: where cheats make most groups, the rewards of honest workers lean more than theirs. What it cannot see: a worker
whose forgeries have the usual rewards and are never refused.

The second sign is an inequality. If a share r of a worker's judged blocks is refused, and audits see some of its work
alone, about as much of what was accepted is false as of what was seen: the false part of the influence on batches is about
r times its share s. So r * s may be at most the limit "poisoning.false_influence". The r that is used is the lower end of
its 95 % interval (Wilson), so that few refusals of few blocks are no evidence; a worker without refusals has r = 0 and
passes however large s is.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.monitors.inputs import LimitExceeded, MonitorInputs, measured
from shoal.monitors.log_stats import NodeStep, StepDigest

STEPS = 40
"""That are looked at: a worker that is refused is quarantined, so it sends little."""
Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""
NAMED_BY = 12
"""Digits of its key that name a worker in commands."""


def remedy(key: str) -> str:
    """What to do about a worker."""
    node = key[:NAMED_BY]
    return (
        f"See its refusals (`shoal credits RUN {node}`) and audit its groups (`shoal audit RUN`). "
        f"`shoal admin quarantine RUN {node}` stops it for an hour, `shoal admin kick RUN {node}` for good"
    )


def look(view: MonitorInputs) -> Iterator[LimitExceeded]:
    """At each worker's work of the newest steps."""
    nodes = view.nodes_of(STEPS)
    influence = sum(one.influence for done in nodes.values() for one in done)
    leaning = leans(view.steps[-STEPS:], int(view.limit("poisoning.lean_groups")))
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
    return LimitExceeded("critical", what, remedy(key), (measured("refused share", rate, most),), key)


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
        "warning", what, remedy(key), (measured("influence x refused share", likely * share, most),), key
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
    return LimitExceeded("warning", what, remedy(key), (measured("reward lean", abs(lean), most),), key)


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

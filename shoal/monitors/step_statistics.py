"""Statistics of each training step from the log's events: who was refused, who influenced it, who was late, who differed.

Only what the next event needs is kept, so that the size depends on the steps that are kept, not on the log.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from shoal.alarms import Alarm
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.event import Entry
from shoal.ledger.leases import LAPSES, LeaseGranted, LeaseLapsed
from shoal.ledger.members import NodeJoined, ValidatorFault
from shoal.ledger.run_events import RulesChanged, RunCreated, RunEnded
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.ledger.versions import CheckpointPublished
from shoal.protocol.algorithm_config import Algorithm, Grpo
from shoal.protocol.audit_and_pay import influence
from shoal.protocol.messages import AlarmEvidence
from shoal.protocol.reward_rules import fault_indices, without_faults

K = TypeVar("K")
V = TypeVar("V")
KEPT_STEPS = 64
"""Steps whose digests are kept: more than any monitor looks back."""
KEPT_SUBMISSIONS = 20_000
"""Leases and submissions that are remembered, and as many groups: the newest, so that a host's log cannot fill memory."""
SAME_STEPS = 8
"""Alarms about the same subject that are raised within this many steps count as one."""


@dataclass
class NodeStep:
    """What one node did during one step."""

    accepted: int = 0
    """Blocks."""
    refused: int = 0
    """Blocks on which validators agreed."""
    influence: float = 0.0
    """Of its groups in the batch that was formed."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each accepted group."""
    leases: int = 0
    lapsed: int = 0
    """Leases, at a deadline or given back or held."""
    stopped: int = 0
    """Of these, those that it gave back because an environment was stopped, as it says."""
    late: int = 0
    """Leases that others overtook, or whose version became too old, at no cost."""
    submissions: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds per group that each of these took."""
    held_s: float = 0.0
    """Time that batches waited for blocks first leased to it after all other groups were accepted, judging included."""
    skews_s: list[float] = field(default_factory=list)
    """Of each submission: the worker's clock when it signed, less the host's when it was booked."""
    compared: int = 0
    """Of a validator: submissions that another had judged before or after."""
    differed: int = 0
    """Of these, the ones on which they said otherwise."""
    faults: int = 0


class _Group(NamedTuple):
    """An accepted group."""

    worker: str
    influence: float
    time: float
    """When it was accepted."""
    holder: str
    """The worker to whom its block was leased first."""


@dataclass
class StepDigest:
    """What happened between the publication of a version and of the next one."""

    step: int
    nodes: dict[str, NodeStep] = field(default_factory=dict)
    flat: int = 0
    """Accepted groups without signal since the last one with signal."""
    accepted: int = 0

    def of(self, key: str) -> NodeStep:
        """A node's part, which is made if it is not there."""
        return self.nodes.setdefault(key, NodeStep())


class Digest:
    """The log so far."""

    def __init__(self) -> None:
        self.steps: deque[StepDigest] = deque([StepDigest(-1)], maxlen=KEPT_STEPS + 1)
        """The last one is still going on."""
        self.names: dict[str, tuple[str, str]] = {}
        """(role, name) of each node."""
        self.acted: dict[tuple[str, str, int], float] = {}
        """When the host acted last on an alarm, by (cause, node, step of the alarm)."""
        self.lr_factor = 1.0
        self.ended = False
        self.time = 0.0
        """Of the newest event."""
        self._leases: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._holders: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        self._makers: OrderedDict[str, str] = OrderedDict()
        self._groups: OrderedDict[tuple[str, int, int], _Group] = OrderedDict()
        self._verdicts: OrderedDict[str, dict[str, tuple[bool, ...]]] = OrderedDict()
        self._sent_at: dict[str, float] = {}
        self._algorithm: Algorithm = Grpo()
        self._block_groups, self._published = 1, 0.0

    @property
    def now(self) -> StepDigest:
        """The step that is going on."""
        return self.steps[-1]

    def longest_leased(self, most: int = 3) -> tuple[tuple[str, float], ...]:
        """Workers whose open leases are the oldest, each with when it got its oldest."""
        oldest = dict[str, float]()
        for worker, issued in self._leases.values():
            oldest.setdefault(worker, issued)
        return tuple(oldest.items())[:most]

    def done(self, step: int) -> Sequence[StepDigest]:
        """Digests of a step and those before it, as far as they are kept."""
        return [one for one in self.steps if 0 <= one.step <= step]

    def see(self, entry: Entry) -> None:
        """Take one event."""
        self.time = entry.time
        match entry.body:
            case RunCreated(rules=rules):
                self._algorithm = rules.algorithm
                self._block_groups = max(1, rules.block_groups)
            case CheckpointPublished(version=version) if version > self.now.step:
                self._published = entry.time
                self.steps.append(StepDigest(version, flat=self.now.flat))
            case RunEnded():
                self.ended = True
            case NodeJoined(key=key, role=role, name=name):
                self.names[key] = (role, name)
            case RulesChanged(evidence=evidence, lr_factor=factor, phase=phase):
                self.lr_factor = factor or self.lr_factor
                self.now.flat = 0 if phase == "running" else self.now.flat
                if isinstance(evidence, AlarmEvidence):
                    self.acted[evidence.cause, evidence.node, evidence.since] = entry.time
            case LeaseGranted() | LeaseLapsed() | SubmissionReceived():
                self._see_lease(entry)
            case Decision() | GroupAccepted() | BatchFormed():
                self._see_groups(entry.body, entry.time)
            case VerdictGiven(submission=name, validator=validator, groups=groups):
                self._compare(name, validator, tuple(group.outcome == "accept" for group in groups))
            case ValidatorFault(validator=validator):
                self.now.of(validator).faults += 1
            case _:
                pass

    def _see_lease(self, entry: Entry) -> None:
        match entry.body:
            case LeaseGranted(lease=lease, worker=worker, stream=stream, version=version, blocks=blocks):
                self.now.of(worker).leases += 1
                for block in blocks:
                    first = self._holders.get((stream, version, block), worker)
                    _remember(self._holders, (stream, version, block), first)
                _remember(self._leases, lease, (worker, entry.time))
            case LeaseLapsed(lease=lease, cause=cause) if lease in self._leases:
                worker, _ = self._leases.pop(lease)
                self.now.of(worker).lapsed += cause in LAPSES
                self.now.of(worker).stopped += cause == "stopped"
                self.now.of(worker).late += cause in ("overtaken", "stale")
            case SubmissionReceived(lease=lease, worker=worker, digest=digest, groups=groups, created=created):
                node = self.now.of(worker)
                _, issued = self._leases.pop(lease, (worker, entry.time))
                node.submissions += 1
                took_s = entry.time - max(issued, self._sent_at.get(worker, 0.0))
                node.seconds.append(took_s / max(1, len(groups)))
                self._sent_at[worker] = entry.time
                if created:
                    node.skews_s.append(created - entry.time)
                _remember(self._makers, digest, worker)

    def _see_groups(self, body: Decision | GroupAccepted | BatchFormed, time: float) -> None:
        match body:
            case Decision(submission=name, accepted=accepted, refused=refused, disputed=disputed):
                worker = self._makers.get(name, "")
                if worker:
                    self.now.of(worker).accepted += len(accepted)
                    self.now.of(worker).refused += len(set(refused) - set(disputed))
            case GroupAccepted(submission=name, rewards=rewards, tokens=tokens, steps=steps):
                worker, faults = self._makers.get(name, ""), fault_indices(body.faults)
                node, left = self.now.of(worker), without_faults(rewards, faults)
                if left or not rewards:
                    node.rewards.append(sum(left) / max(1, len(left)))
                moved = influence(rewards, tokens, self._algorithm, steps=steps, faults=faults)
                holder = self._holders.get((body.stream, body.version, body.slot // self._block_groups), worker)
                place = body.stream, body.version, body.slot
                _remember(self._groups, place, _Group(worker, moved, time, holder))
                self.now.accepted += 1
                self.now.flat = 0 if body.signal else self.now.flat + 1
            case BatchFormed(groups=places, stream=stream):
                self.now.flat = 0
                groups = [self._groups.get((stream, *place)) for place in places]
                members = [group for group in groups if group is not None and group.worker]
                for group in members:
                    self.now.of(group.worker).influence += group.influence
                self._see_wait(members)

    def _see_wait(self, members: Sequence[_Group]) -> None:
        """Note for whom a batch waited last, and how long: since the version before and all other groups were there."""
        if not members:
            return
        last = max(members, key=lambda group: group.time)
        others = [group.time for group in members if group.holder != last.holder]
        self.now.of(last.holder).held_s += max(0.0, last.time - max([self._published, *others]))

    def _compare(self, name: str, validator: str, said: tuple[bool, ...]) -> None:
        before = self._verdicts.get(name, {})
        for other, theirs in before.items():
            for key in (validator, other):
                node = self.now.of(key)
                node.compared += 1
                node.differed += theirs != said
        _remember(self._verdicts, name, before | {validator: said})

    def has_acted(self, alarm: Alarm, raised_s: float = -math.inf) -> bool:
        """Whether the log holds a request of the host with this alarm's evidence, and none from before `raised_s`. After a
        restart, an alarm that follows from evaluations may be raised a few steps from where it was."""
        about = [(since, at) for (cause, node, since), at in self.acted.items() if (cause, node) == alarm.subject]
        return any(abs(since - alarm.since) <= SAME_STEPS and at >= raised_s for since, at in about)


def _remember(known: "OrderedDict[K, V]", key: K, value: V) -> None:
    known[key] = value
    if len(known) > KEPT_SUBMISSIONS:
        known.popitem(last=False)

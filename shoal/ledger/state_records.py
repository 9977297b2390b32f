"""The records that the state of a run consists of, changed event by event.

A record here is what the log says; the type of the same name in `protocol/messages` is what crosses the wire.
"""

from bisect import insort

import msgspec

from shoal.algos.sampling_evidence import SamplingEvidence
from shoal.ledger.task_difficulty import SolvedRecord, TableChange
from shoal.protocol.messages import GroupVerdict, StepRewards

CHECK_FADES = 0.98
"""Each verdict multiplies the longest check before it by this: half of it is left after 34 verdicts."""


class TurnsRecord(msgspec.Struct):
    """How a validator keeps its turns. Times are seconds since the epoch."""

    joined: float = 0.0
    """When it first joined."""
    voted: float = 0.0
    """When it last gave a verdict; 0 before the first."""
    voted_on: int = -1
    """Number of the event of the submission that this verdict judged."""
    check_s: float = 0.0
    """Longest time that it lately took for a verdict, while it could judge; less with each further verdict."""
    missed: int = 0
    """Turns that it missed, or gave its verdict late in, ever."""
    missed_at: float = 0.0
    """The last of these."""
    counted: int = 0
    """Those that count at present."""
    counts_until: float = 0.0
    """When they count no more, if it gives verdicts by then."""
    confirmed: int = 0
    """Rechecks since its last fault that confirmed a first verdict of its own with audited groups."""

    def misses_count(self, now: float) -> bool:
        """Whether the turns that it missed still count: for a while, and until it sends a verdict."""
        return (
            now < self.counts_until or self.voted < self.missed_at
        )  # guard: verdicts-excuse-nothing, silent-until-heard

    def miss(self, now: float, counts_s: float) -> None:
        """A turn passed, or its verdict was late. It counts for so long."""
        self.counted = self.counted + 1 if self.misses_count(now) else 1
        self.missed, self.missed_at, self.counts_until = self.missed + 1, now, now + counts_s

    def vote(self, now: float, submission: int, took_s: float) -> None:
        """A verdict on the submission with this event."""
        self.voted, self.voted_on = now, submission
        self.check_s = max(took_s, CHECK_FADES * self.check_s)


class NodeRecord(msgspec.Struct):
    """A node that joined. Counts are of groups unless they say otherwise, credits are policy tokens."""

    key: str
    role: str
    name: str
    implementation: str
    dtype: str
    device: str
    standing: str = "new"
    credits: int = 0
    accepted: int = 0
    refused: int = 0
    lapsed: int = 0
    """Leases."""
    reasons: dict[str, int] = {}
    """Refused groups by check."""
    leases: int = 0
    """Ever granted."""
    stake: list[int] = []
    """Pay of each group that has not vested, oldest first, in tokens. A slash takes it."""
    vested: int = 0
    paid_lapses: int = 0
    """Lapsed leases that cost pay."""
    influence: float = 0.0
    """Sum over its groups that a batch took, see `protocol.audit_and_pay.influence`."""
    valid_blocks: int = 0
    """Accepted blocks since the last refused one, or since its engine changed. Decides the audit rate."""
    evidence: dict[str, SamplingEvidence] = {}
    """Against the honesty of its sampling over time, by validator."""
    failures: int = 0
    """Of a worker: refused submissions; each doubles the next quarantine. Of a validator: its faults."""
    until: float = 0.0
    """End of the quarantine, seconds since the epoch."""
    quarantined_for: str = ""
    """The submission that caused it."""
    last_reason: str = ""
    dropped: int = 0
    """Times in a row that its leases lapsed or were given back, with nothing submitted since."""
    dropped_at: float = 0.0
    """The last of these times, seconds since the epoch."""
    stale: int = 0
    """Leases closed at no cost: their version became too old, or the host's stage hung. Not counted in `lapsed`."""
    signed: int = 0
    """When it signed the latest join or leave that the log holds, seconds since the epoch by its own clock."""
    left: bool = False
    """Whether it left and has not joined again."""
    turns: TurnsRecord = msgspec.field(default_factory=TurnsRecord)
    rejoins_until: float = 0.0
    """When its changed joins no longer count, seconds since the epoch: each counts for `Law.rejoin_s`, in turn."""
    given: int = 0
    """Blocks ever leased to it."""
    unfilled: int = 0
    """Of these, blocks that it dropped, and blocks that a worker filled before it that was leased them later."""
    pace_s: float = 0.0
    """Seconds that it takes for a block, smoothed over its submissions; 0 before the first."""
    sent_at: float = 0.0
    """When it last submitted, seconds since the epoch."""
    owes: int = 0
    """Groups whose pay it will lose for a lapse, because it had no pay to lose then."""

    def join_again(self, facts: tuple[str, str, str, str, str], counts_until: float) -> None:
        """It joined under perhaps another role, name, implementation, dtype or device."""
        if facts[2:] != (self.implementation, self.dtype, self.device):
            self.valid_blocks = 0  # another engine has to prove itself first  # guard: new-engine-is-unproven
        self.role, self.name, self.implementation, self.dtype, self.device = facts
        self.rejoins_until = counts_until

    def sign(self, created: int, left: bool) -> None:
        """It signed a join or a leave at this time by its own clock, if any."""
        self.signed, self.left = created or self.signed, left

    def drop(self, now: float) -> None:
        """A lease lapsed. Those that end at the same moment are one drop: a node that stops, or a coordinator that was
        down."""
        self.lapsed += 1
        self.dropped += self.dropped == 0 or self.dropped_at != now  # guard: one-moment-one-drop
        self.dropped_at = now

    def quarantine(self, until: float, submission: str, cause: str) -> None:
        """It gets no leases until then. The evidence against it begins anew."""
        self.standing, self.until, self.quarantined_for = "quarantined", until, submission
        self.evidence = {}
        if not self.last_reason.startswith(cause):  # else a verdict has told it, with its figures
            self.last_reason = cause

    def measure_pace(self, took_s: float) -> None:
        """It took so long for a block."""
        self.pace_s = (self.pace_s + took_s) / 2 if self.pace_s else took_s


class LeaseRecord(msgspec.Struct):
    """A lease: open, lapsed, stale, overtaken, submitted or decided."""

    id: str
    worker: str
    stream: str
    version: int
    blocks: tuple[int, ...]
    issued: float
    deadline: float
    status: str = "open"
    submission: str = ""
    soft: float = 0.0
    """When others may lease the same blocks, too, seconds since the epoch."""
    unfilled: int = 0
    """Blocks that count as `NodeRecord.unfilled`."""


class StopsRecord(msgspec.Struct):
    """How often an environment took too long in a block, or ended its process."""

    workers: list[str] = []
    """Key of the worker, for each time."""
    tasks: str = ""
    """Tasks of the block and their environments, as the host says."""


class BlockRecord(msgspec.Struct):
    """A block of a version: free, leased, submitted or done."""

    status: str
    lease: str
    """The lease that filled it; before that, the newest one that may."""
    claims: list[str] = []
    """Leases that may still fill it, oldest first: open, or submitted and not decided."""
    holders: list[str] = []
    """Key of each worker that was ever leased it, in that order."""
    free_since: float = 0.0
    """When it was last given back, seconds since the epoch."""
    dropped_at: float = 0.0
    """When a lease of it last lapsed, seconds since the epoch."""
    stopped: StopsRecord | msgspec.UnsetType = msgspec.UNSET
    """Who gave it back because an environment took too long, or ended its process, if anyone did."""

    def grant(self, lease: str, worker: str) -> None:
        """One more worker may fill it."""
        self.status = "leased" if self.status == "free" else self.status
        self.lease, self.claims, self.holders = lease, [*self.claims, lease], [*self.holders, worker]

    def fill(self, lease: str) -> None:
        """It is done, by this lease."""
        self.status, self.lease, self.claims = "done", lease, []

    def stop(self, worker: str, tasks: str) -> None:
        """An environment took too long on a worker's machine, or ended its process."""
        self.stopped = self.stopped or StopsRecord()
        self.stopped.workers.append(worker)
        self.stopped.tasks = tasks


class SlotRecord(msgspec.Struct):
    """A final slot, and where its group is."""

    status: str
    """signal; flat: its group teaches nothing; continued: its group is one of continuations; void."""
    submission: str = ""
    index: int = 0
    """The group's place in the submission."""
    digest: str = ""
    rewards: tuple[float, ...] = ()
    tokens: int = 0
    step: int = -1
    """The newest batch that took it; -1 if none did."""
    steps: tuple[StepRewards, ...] | msgspec.UnsetType = msgspec.UNSET
    """What the turns or steps of each rollout earn; states of runs that credit rollouts keep their hash."""
    faults: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Indices of the rollouts on which the environment failed, if it did on any."""


class SubmissionRecord(msgspec.Struct):
    """A submission, what its receipt says, and the verdicts on it."""

    lease: str
    digest: str
    seq: int
    head: str
    time: float
    groups: tuple[str, ...]
    """Digest of each group."""
    judged_at: float
    """When the last verdict came, or the submission itself."""
    audited: tuple[int, ...] = ()
    rate: float = 1.0
    draws: tuple[float, ...] = ()
    mean_influence: float = 0.0
    mean_pay: float = 0.0
    order: tuple[str, ...] = ()
    """Validators in the order of their turns."""
    verdicts: dict[str, tuple[GroupVerdict, ...]] = {}
    """By validator, in the order in which they came; dropped when no more can follow."""
    projections: dict[str, str] = {}
    """Blob of each validator's projections."""
    differs: list[tuple[str, str]] = []
    """(validator, earlier validator) where the first found other activations than the second claims."""
    decided: bool = False
    record: str | msgspec.UnsetType = msgspec.UNSET
    """Blob of the host's record of the lease, if the host plays; states without it keep their hash."""

    def ahead_of(self, key: str, silent: set[str]) -> list[str]:
        """Validators whose turns come before that of `key`, in order. Those without a drawn turn come last, and silent
        ones are skipped."""
        left = [validator for validator in self.order if validator not in self.verdicts]
        before = left[: left.index(key)] if key in left else left
        return [validator for validator in before if validator not in silent]  # guard: silent-validators-are-skipped


class VersionRecord(msgspec.Struct):
    """A policy version and the work done with it."""

    root: str
    manifest: str
    blocks: dict[int, BlockRecord] = {}
    slots: dict[int, SlotRecord] = {}
    revealed: bool = False


class StreamRecord(msgspec.Struct):
    """One policy of the run: its versions, and the groups and batches that lead from each to the next."""

    name: str
    versions: dict[int, VersionRecord] = {}
    pool: list[tuple[int, int]] = []
    """(version, slot) of accepted groups with signal that no batch has taken, in the order of acceptance."""
    batches: dict[int, tuple[tuple[int, int], ...]] = {}
    free: list[tuple[int, int]] = []
    """(version, block) of blocks that were given back, ascending."""
    flat: int = 0
    """Groups accepted without signal since the last one with signal, the last batch, or the last resume."""
    flat_reward: float = 0.0
    """Sum of the mean rewards of those whose rewards are equal."""
    unbegun: int | msgspec.UnsetType = msgspec.UNSET
    """Of `flat`, slots without rollouts, whose tasks cannot begin; states of runs without them keep their hash."""
    unbegun_cause: str | msgspec.UnsetType = msgspec.UNSET
    """Why the last of them cannot."""
    stopped: int | msgspec.UnsetType = msgspec.UNSET
    """Of `flat`, slots without rollouts, whose environment was stopped wherever it was played; as above."""
    stopped_tasks: str | msgspec.UnsetType = msgspec.UNSET
    """Tasks of the last of them, as the host says."""
    failed: int | msgspec.UnsetType = msgspec.UNSET
    """Of `flat`, groups of which faults of the environment leave too few rollouts; as above."""
    solved: dict[str, SolvedRecord] = {}
    """By label of an environment: what its groups showed. Empty if draws do not follow solve rates."""
    changes: dict[int, TableChange] = {}
    """By version: what its draw table changed in that of the version before, ascending."""
    lr_factors: list[tuple[int, float]] | msgspec.UnsetType = msgspec.UNSET
    """(first step, factor) of the learning rate, ascending; states of runs whose host never lowered it keep their hash."""

    @property
    def version(self) -> int:
        """Latest published policy version, -1 before the first."""
        return len(self.versions) - 1

    def lr_factor(self, step: int) -> float:
        """What the learning rate of a step is multiplied by: what the host had last asked for when its batch was formed."""
        return next((factor for first, factor in reversed(self.lr_factors or []) if first <= step), 1.0)

    def lower_rate(self, factor: float) -> None:
        """From the next batch on, the learning rate is multiplied by this. Batches that are formed keep theirs, so a step
        that is taken again after a kill gives the same bytes."""
        first = len(self.batches)  # guard: formed-batches-keep-their-rate
        before = [(step, known) for step, known in self.lr_factors or [] if step < first]
        self.lr_factors = [*before, (first, factor)]

    def forget_flat(self) -> None:
        """Groups without signal are counted anew."""
        self.flat, self.flat_reward = 0, 0.0
        self.unbegun = self.unbegun_cause = self.stopped = self.stopped_tasks = self.failed = msgspec.UNSET

    @property
    def num_equal(self) -> int:
        """Of `flat`, groups whose rewards are equal."""
        return self.flat - (self.unbegun or 0) - (self.stopped or 0) - (self.failed or 0)

    @property
    def mean_flat_reward(self) -> float:
        """Of these groups."""
        return self.flat_reward / max(1, self.num_equal)

    def count_unbegun(self, slots: int, why: str) -> None:
        """Count slots whose tasks cannot begin among the groups without signal: they fill no batch either."""
        self.flat += slots
        self.unbegun, self.unbegun_cause = (self.unbegun or 0) + slots, why

    def count_stopped(self, slots: int, tasks: str) -> None:
        """The same of slots whose environment was stopped."""
        self.flat += slots
        self.stopped, self.stopped_tasks = (self.stopped or 0) + slots, tasks

    def count_failed(self) -> None:
        """The same of a group of which faults leave too few rollouts."""
        self.flat, self.failed = self.flat + 1, (self.failed or 0) + 1

    def give_back(self, version: int, blocks: tuple[int, ...]) -> None:
        """Blocks may be leased again."""
        for block in blocks:
            self.versions[version].blocks[block].status = "free"
            insort(self.free, (version, block))

    def take(self, version: int, blocks: tuple[int, ...]) -> None:
        """Blocks are not free any more."""
        taken = {(version, block) for block in blocks}
        self.free = [place for place in self.free if place not in taken]

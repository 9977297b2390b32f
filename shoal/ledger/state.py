"""The state of a run, as records. Only `facts/` changes it, event by event.

Read by the rules, the coordinator and every auditor. A state is a value: two replays of one log give the same bytes, and
`state_hash` shows it. A record here is what the log says; the type of the same name in `protocol/types` is what crosses
the wire.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.algos.sampling_evidence import Evidence
from shoal.ledger.entry import GENESIS
from shoal.ledger.law import BEFORE_LAWS, Law
from shoal.ledger.pools import SolvedRecord, TableChange
from shoal.ledger.uses import UsesRecord
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.difficulty import Difficulty
from shoal.protocol.tasklists import TaskList
from shoal.protocol.types import EnvSpec, GroupVerdict, Publishers, Rules, Sampling
from shoal.protocol.wire import digest, to_json


class TurnsRecord(msgspec.Struct):
    """How a validator keeps its turns, since version 2 of the rules. Times are seconds since the epoch."""

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


class Member(msgspec.Struct):
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
    """Sum over its groups that a batch took, see `protocol.audits.influence`."""
    valid_blocks: int = 0
    """Accepted blocks since the last refused one, or since its engine changed. Decides the audit rate."""
    evidence: dict[str, Evidence] = {}
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
    missed: int = 0
    """Of a validator, before version 2 of the rules: turns in a row that it missed while another validator judged."""
    heard: float = 0.0
    """Likewise: when it last sent a verdict or missed a turn, seconds since the epoch. The next counts from then."""
    stale: int = 0
    """Leases closed at no cost because their version became too old. Not counted in `lapsed`."""
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
    """When others may lease the same blocks, too, seconds since the epoch. 0, as before version 2 of the rules: never."""
    unfilled: int = 0
    """Blocks that count as `Member.unfilled`."""


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
    dropped_by: str = ""
    """Key whose lease of it lapsed last; empty again once the block is submitted."""
    dropped_at: float = 0.0
    """When that was, seconds since the epoch."""


class SlotRecord(msgspec.Struct):
    """A final slot: signal, flat (its group teaches nothing), continued (of continuations), void; where its group is."""

    status: str
    submission: str = ""
    index: int = 0
    """The group's place in the submission."""
    digest: str = ""
    rewards: tuple[float, ...] = ()
    tokens: int = 0
    step: int = -1
    """The newest batch that took it; -1 if none did."""


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
    """Sum of their mean rewards."""
    solved: dict[str, SolvedRecord] = {}
    """By label of an environment: what its groups showed. Empty if draws do not follow solve rates."""
    changes: dict[int, TableChange] = {}
    """By version: what its draw table changed in that of the version before, ascending."""
    uses: UsesRecord | msgspec.UnsetType = msgspec.UNSET
    """What is used again; states of runs that use each group once keep their hash."""

    @property
    def version(self) -> int:
        """Latest published policy version, -1 before the first."""
        return len(self.versions) - 1

    def forget_flat(self) -> None:
        """Groups without signal are counted anew."""
        self.flat, self.flat_reward = 0, 0.0

    def give_back(self, version: int, blocks: tuple[int, ...]) -> None:
        """Blocks may be leased again."""
        for block in blocks:
            self.versions[version].blocks[block].status = "free"
            insort(self.free, (version, block))

    def take(self, version: int, blocks: tuple[int, ...]) -> None:
        """Blocks are not free any more."""
        taken = {(version, block) for block in blocks}
        self.free = [place for place in self.free if place not in taken]


NO_RULES = Rules(0, 0, 0, 0, 0, 0.0, 0.0, "", {})
NO_SAMPLING = Sampling(0.0, 0, 0)
"""What a state holds before the run is created."""


class State(msgspec.Struct, dict=True):
    """All that a run remembers. `state_hash` of it is equal for equal logs, whatever `once_per_event` keeps beside it."""

    run: str = ""
    name: str = ""
    run_key: str = ""
    trainer_key: str = ""
    """The publisher now."""
    validators: tuple[str, ...] = ()
    chain_end: str = ""
    audit_chain_end: str = ""
    envs: tuple[EnvSpec, ...] = ()
    sampling: Sampling = NO_SAMPLING
    rules: Rules = NO_RULES
    """What the run file fixes."""
    law: Law = BEFORE_LAWS
    """What the project fixes: constants and version of the rules."""
    difficulty: Difficulty | None = None
    """How draws follow solve rates; None if they do not."""
    config: dict[str, Any] = {}
    phase: str = "running"
    pause_cause: str = ""
    """Why the run paused itself; empty if the host paused it."""
    host_signed: int = 0
    """When the host signed its latest request that the log holds, seconds since the epoch by its own clock."""
    members: dict[str, Member] = {}
    leases: dict[str, LeaseRecord] = {}
    submissions: dict[str, SubmissionRecord] = {}
    streams: dict[str, StreamRecord] = msgspec.field(default_factory=lambda: {MAIN_STREAM: StreamRecord(MAIN_STREAM)})
    issued: int = 0
    """Credits ever issued: the sum of all balances and of what is burned."""
    burned: int = 0
    """Credits slashed and forfeited."""
    influence: float = 0.0
    """Sum over accepted groups; with their number, the mean that audits compare with."""
    block_tokens: int = 0
    """Policy tokens of accepted groups; with their number, the mean that sizes leases."""
    accepted_groups: int = 0
    refused: dict[str, int] = {}
    """Refused groups by check."""
    open_leases: list[str] = []
    """Oldest first."""
    pending: list[str] = []
    """Submissions without a decision, oldest first."""
    rechecks: list[str] = []
    """Accepted submissions that await a second validator, oldest first."""
    due: list[tuple[float, str, str]] = []
    """(time, what, whose), ascending: what the clock will end. Lets a tick look at nothing else."""
    seq: int = -1
    head: str = GENESIS
    time: float = 0.0
    """Of the newest event, seconds since the epoch."""
    root_key: str | msgspec.UnsetType = msgspec.UNSET
    """The key that names publishers, if it is not the run key; states without it keep their hash."""
    task_lists: dict[str, TaskList] | msgspec.UnsetType = msgspec.UNSET
    """By label: what is drawn from, if not all tasks."""
    named: Publishers | msgspec.UnsetType = msgspec.UNSET
    """All publishers, once the first was replaced."""

    @property
    def root(self) -> str:
        """The key that names publishers."""
        return self.root_key or self.run_key

    @property
    def publishers(self) -> Publishers:
        """All publishers so far, in order."""
        return self.named or Publishers(self.trainer_key)

    @property
    def main(self) -> StreamRecord:
        """The stream of a run with one policy."""
        return self.streams[MAIN_STREAM]

    def stream_of(self, lease: LeaseRecord) -> StreamRecord:
        """The stream that a lease works for."""
        return self.streams[lease.stream]

    def lease_of(self, submission: SubmissionRecord) -> LeaseRecord:
        """The lease that a submission fills."""
        return self.leases[submission.lease]

    def judges(self) -> list[str]:
        """Keys of the validators that take part, sorted."""
        return [key for key in self.panel() if not self.members[key].left]  # guard: left-judges-nothing

    def panel(self) -> list[str]:
        """The same, with those that left: they may come back, so the last one must not judge alone. A `kick` ends that."""
        validators = (member for member in self.members.values() if member.role == "validator")
        return sorted(member.key for member in validators if member.standing not in ("kicked", "suspended"))

    def maker_of(self, stream: StreamRecord, place: tuple[int, int]) -> str:
        """Key of the worker that made the group at a (version, slot)."""
        return self.lease_of(self.submissions[stream.versions[place[0]].slots[place[1]].submission]).worker

    def open_leases_of(self, worker: str) -> list[LeaseRecord]:
        """Open leases of a worker, oldest first."""
        return [self.leases[i] for i in self.open_leases if self.leases[i].worker == worker]

    def close(self, lease: LeaseRecord) -> None:
        """A lease is not open any more, and the clock will not end it."""
        self.open_leases.remove(lease.id)
        self.forget(lease.deadline, "lease", lease.id)
        self.forget(lease.soft, "soft", lease.id)

    def release(self, lease: LeaseRecord, blocks: Iterable[int], now: float) -> None:
        """A lease will not fill these blocks any more. Those that no other lease may fill are free."""
        stream = self.stream_of(lease)
        for number in blocks:
            block = stream.versions[lease.version].blocks[number]
            block.claims = [name for name in block.claims if name != lease.id]
            if block.claims:  # guard: other-holder-keeps-it
                block.lease = block.claims[-1]
                held = [self.leases[name].status for name in block.claims]
                block.status = "submitted" if "submitted" in held else "leased"
            elif block.status != "done":  # guard: done-stays-done
                block.free_since = now
                stream.give_back(lease.version, (number,))

    def slots_of(self, lease: LeaseRecord) -> list[int]:
        """Slots of a lease, in the order of its groups."""
        size = self.rules.block_groups
        return [slot for block in lease.blocks for slot in range(block * size, (block + 1) * size)]

    def expect(self, time: float, what: str, whose: str) -> None:
        """Note what the clock will end."""
        insort(self.due, (time, what, whose))

    def forget(self, time: float, what: str, whose: str) -> None:
        """It ended, or will not any more."""
        place = bisect_left(self.due, (time, what, whose))
        if self.due[place : place + 1] == [(time, what, whose)]:
            del self.due[place]

    def due_by(self, now: float, what: str, among: Iterable[str]) -> list[str]:
        """Of these, whose time has come, in their order: old logs were decided in it."""
        reached = self.due[: bisect_left(self.due, (now, chr(0x10FFFF), ""))]
        found = {whose for _, kind, whose in reached if kind == what}
        return [whose for whose in among if whose in found] if found else []  # guard: due-in-order


def state_hash(state: State) -> str:
    """SHA-256 over the canonical encoding of a state, hex."""
    return digest(to_json(msgspec.to_builtins(state, str_keys=True)))

"""The state of a run: all records, and what follows from several of them; changed event by event.

A state is a value: two replays of one log give the same bytes, and `state_hash` shows it.
"""

import functools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from shoal.ledger.constants import Law
from shoal.ledger.event import GENESIS
from shoal.ledger.fault_rate import FaultsRecord
from shoal.ledger.state_records import LeaseRecord, NodeRecord, StreamRecord, SubmissionRecord
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.encoding import digest, to_json
from shoal.protocol.messages import EnvSpec, Publishers, Rules, Sampling
from shoal.protocol.task_draws import DifficultyRule, TaskList

NO_RULES = Rules(0, 0, 0, 0, 0, 0.0, 0.0, "", {})
NO_SAMPLING = Sampling(0.0, 0, 0)
"""What a state holds before the run is created."""


class State(msgspec.Struct, dict=True):
    """All that a run remembers. `state_hash` of it is equal for equal logs.

    What `once_per_event` keeps beside the fields is part of neither.
    """

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
    law: Law = Law()
    """What the project fixes: constants and version of the rules."""
    difficulty: DifficultyRule | None = None
    """How draws follow solve rates; None if they do not."""
    config: dict[str, Any] = {}
    phase: str = "running"
    pause_cause: str = ""
    """As in `RulesChanged`; empty if the host paused it."""
    host_signed: int = 0
    """When the host signed its latest request that the log holds, seconds since the epoch by its own clock."""
    members: dict[str, NodeRecord] = {}
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
    faults: FaultsRecord | msgspec.UnsetType = msgspec.UNSET
    """What environments failed on, once a group was accepted."""
    host_validators: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Keys of the validators that the host started when the run was created."""

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
        """The same, with those that left, sorted. They may come back, so their leaving must not make the last one judge
        alone. The host's `kick` ends that."""
        validators = (member for member in self.members.values() if member.role == "validator")
        return sorted(member.key for member in validators if member.standing not in ("kicked", "suspended"))

    def has_hosts_word(self, submission: SubmissionRecord, validators: Iterable[str]) -> bool:
        """Whether faults that these validators name are the host's finding, too: they are its own, or its stage played."""
        return bool(submission.record) or {*validators} <= {*(self.host_validators or ())}

    def maker_of(self, stream: StreamRecord, place: tuple[int, int]) -> str:
        """Key of the worker that made the group at a (version, slot)."""
        version, slot = place
        return self.lease_of(self.submissions[stream.versions[version].slots[slot].submission]).worker

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
                sent = any(self.leases[name].status == "submitted" for name in block.claims)
                block.status = "submitted" if sent else "leased"
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
        """Of these, whose time has come, in their order."""
        reached = self.due[: bisect_left(self.due, (now, chr(0x10FFFF), ""))]
        found = {whose for _, kind, whose in reached if kind == what}
        return [whose for whose in among if whose in found] if found else []  # guard: due-in-order


def state_hash(state: State) -> str:
    """SHA-256 over the canonical encoding of a state, hex."""
    return digest(to_json(msgspec.to_builtins(state, str_keys=True)))


# --- values that follow from a state, computed once for each event ---


P = ParamSpec("P")
T = TypeVar("T")


def once_per_event(count: Callable[Concatenate[State, P], T]) -> Callable[Concatenate[State, P], T]:
    """A function of a state, and perhaps of one of its streams, that is computed once for each event.

    The value is kept beside the fields of the state, so it changes no hash. Callers must not change the value.
    """
    name = f"{count.__module__}.{count.__qualname__}"

    @functools.wraps(count)
    def remembered(state: State, *of: P.args, **none: P.kwargs) -> T:
        key = " ".join([name, *(stream.name for stream in of)])  # type: ignore[attr-defined]
        seq, value = state.__dict__.get(key, (None, None))
        if seq != state.seq:  # guard: counted-once, counted-afresh
            value = count(state, *of, **none)
            state.__dict__[key] = (state.seq, value)
        return value

    return remembered

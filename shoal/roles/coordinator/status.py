"""Status of a run as anyone may read it: phase, what it waits for, nodes, and the solve rate of each environment.

Solve rates are of the groups accepted between two batches. The coordinator has the links of versions in use, so it knows
the task of each slot before the log does. A restart loses the figures of one step, and nothing is decided by them: draws
that follow solve rates count in `ledger/task_difficulty`.
"""

from collections.abc import Mapping
from itertools import islice

from msgspec.structs import replace

from shoal.alarms import StandingAlarms
from shoal.humanize import duration
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.errors import Refused
from shoal.ledger.event import Entry
from shoal.ledger.fault_rate import FAULTS
from shoal.ledger.remedies import NO_LEASE, SILENT_REMEDY, WORKER_REMEDY
from shoal.ledger.slot_draws import slot_of, table_of
from shoal.ledger.state import state_hash
from shoal.ledger.state_records import NodeRecord
from shoal.ledger.status import (
    ALL_GONE,
    VERDICTS,
    node_state,
    run_info_of,
    status_of,
    waiting_after_lapses,
)
from shoal.ledger.task_difficulty import solve_rate
from shoal.ledger.validator_turns import absent, overdue, overdue_verdicts, silent, slow_check
from shoal.protocol import messages as t
from shoal.protocol.constants import LONG_POLL_S, MAX_NODES, MAX_STANDING_ALARMS
from shoal.protocol.continuations import is_continued_slot
from shoal.protocol.messages import SolveRate
from shoal.protocol.reward_rules import fault_indices, without_faults
from shoal.protocol.tolerances import needs_of
from shoal.roles.coordinator.coordinator import Coordinator

KEPT = 8
"""Batches whose figures are remembered: the trainer may ask for one again."""


class SolveRates:
    """Follows a coordinator's log."""

    def __init__(self, coordinator: Coordinator, solved: Mapping[str, float]) -> None:
        """`solved` is the least reward of a solved rollout, by label."""
        self._coordinator, self._solved = coordinator, solved
        self._since: dict[str, list[float]] | None = {} if not coordinator.state.accepted_groups else None
        """Solve rates of groups since the last batch, by label; None until there is one after a restart."""
        self._by_step: dict[int, dict[str, SolveRate]] = {}
        coordinator.log_writer.watch(self._see)

    def of_step(self, step: int) -> dict[str, SolveRate]:
        """Figures of the groups accepted for a step, by label; empty if they were forgotten."""
        return self._by_step.get(step, {})

    def _see(self, entries: list[Entry]) -> None:
        for body in (entry.body for entry in entries):
            if isinstance(body, GroupAccepted) and self._since is not None:
                if is_continued_slot(body.slot, self._coordinator.state.rules.block_groups):
                    continue
                stream, link = (
                    self._coordinator.state.streams[body.stream],
                    self._coordinator.slot_links[body.version + 1],
                )
                label = slot_of(self._coordinator.state, stream, body.version, body.slot, link).env
                rewards = without_faults(body.rewards, fault_indices(body.faults))
                if rewards:
                    self._since.setdefault(label, []).append(solve_rate(rewards, self._solved.get(label, 1.0)))
            elif isinstance(body, BatchFormed):
                if self._since is not None:
                    self._keep(body.step, self._since)
                self._since = {}

    def _keep(self, step: int, rates: Mapping[str, list[float]]) -> None:
        state = self._coordinator.state
        table = table_of(state, state.main, state.main.version)
        self._by_step[step] = {
            env.label: SolveRate(sum(own) / len(own) if own else None, len(own), env.weight)
            for env in table
            for own in [rates.get(env.label, [])]
        }
        while len(self._by_step) > KEPT:
            del self._by_step[min(self._by_step)]


SILENT_AFTER_S = 2 * LONG_POLL_S + 5.0
"""A worker that waits for a lease asks again after a long poll, and at most as long a wait that its answer names. One that
asked for nothing for longer is silent."""

MAX_SILENT = 2
"""Silent workers that a wait names."""

HASHING_SHARE = 0.02
"""Maximum fraction of the coordinator's time spent hashing its state for `GET /v1/state`."""


class StatusCache:
    """What anyone may read about a coordinator's run."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._solve_rates = coordinator, SolveRates(coordinator, coordinator.solved)
        self._began = coordinator.clock()
        self._waiting, self._alarms = ("", self._began), StandingAlarms(coordinator.alarms)
        """What is waited for, and since when."""
        self._hashed: t.StateHash | None = None
        self._hash_again_at = 0.0
        self._blamed = -1, ""
        """An event's number, and what `_faulted_task` found then."""

    def info(self) -> t.RunInfo:
        """The run's description."""
        needs = needs_of(
            self._coordinator.needs_transformers, self._coordinator.has_adapter, self._coordinator.has_coded_base
        )
        return replace(run_info_of(self._coordinator.state), needs=needs, origin=self._coordinator.origin())

    def nodes(self, after: str = "") -> list[t.NodeState]:
        """At most `MAX_NODES` members in the order in which they joined, from the one after `after`. Raises `Refused`."""
        keys = iter(self._coordinator.state.members)
        if after and after not in keys:  # the search also drops it and all before it
            raise Refused("unknown", f"no node {after[:16]} in this run")
        page = [self._coordinator.state.members[key] for key in islice(keys, MAX_NODES)]  # guard: page-of-nodes
        at_work, forked = self._at_work() | self._punctual(), self._coordinator.forked
        return [
            replace(node_state(one), silent_s=self._silent_s(one, at_work), forked=one.key in forked) for one in page
        ]

    def _at_work(self) -> set[str]:
        """Workers with a lease that they may still be at work on."""
        leases, now = (
            map(self._coordinator.state.leases.__getitem__, self._coordinator.state.open_leases),
            self._coordinator.clock(),
        )
        return {lease.worker for lease in leases if lease.soft > now}

    def _punctual(self) -> set[str]:
        """Validators that owe no verdict and missed no turns."""
        state, now = self._coordinator.state, self._coordinator.clock()
        return (
            {*state.judges()} - silent(state, now) - overdue(state, now, self._began, self._coordinator.entered).keys()
        )

    def _silent_s(self, member: NodeRecord, at_work: set[str]) -> float:
        """For how long a node has asked for nothing, although it is not `at_work`; 0 if it has not been silent for long, or
        left."""
        now = self._coordinator.clock()
        silent_s = now - max(self._began, self._coordinator.heard.get(member.key, 0.0))
        if (
            member.role not in ("worker", "validator")
            or member.left
            or member.standing == "kicked"
            or silent_s < SILENT_AFTER_S
        ):
            return 0.0
        return 0.0 if member.key in at_work else silent_s  # guard: at-work-is-no-silence

    def _silent_workers(self) -> tuple[str, bool]:
        """Which silent workers a wait for workers is for: those with leases that are late; if all are silent, any. And
        whether one of them may still fill its lease, so that to start it again would lose its work."""
        state = self._coordinator.state
        here = [one for one in state.members.values() if one.role == "worker" and not one.left]
        at_work = self._at_work()
        silent = {one.key: silent_s for one in here if (silent_s := self._silent_s(one, at_work))}
        holders = {state.leases[name].worker for name in state.open_leases}
        if len(silent) < sum(one.standing != "kicked" for one in here):
            silent = {key: silent_s for key, silent_s in silent.items() if key in holders}
        named = [f"{state.members[key].name} ({key[:12]}) silent for {duration(s)}" for key, s in silent.items()]
        more = f" and {len(named) - MAX_SILENT} more" if len(named) > MAX_SILENT else ""
        return ", ".join(named[:MAX_SILENT]) + more, not holders.isdisjoint(silent)

    def status(self) -> t.Status:
        """How far the run is, and what it waits for."""
        state, now = self._coordinator.state, self._coordinator.clock()
        plain = status_of(state, now)
        reason, remedy, flat = plain.waiting_for, plain.remedy, plain.no_signal
        same = f"{reason}, after {state.main.version}"
        if state.phase == "paused":
            same = f"paused: {state.pause_cause}"
        elif flat and state.phase == "running":
            same = "no signal"
        if same != self._waiting[0]:  # by an event: the newest, if we were asked since the one before it
            self._waiting = (same, max(self._began, state.time))
        if (full := self._coordinator.over_quota) and state.phase == "running":  # guard: quota-is-told
            reason = f"{reason}; {NO_LEASE}: {full}"
        if behind := self._coordinator.clock_behind():  # guard: clock-is-told
            reason = f"{reason}; {behind}"
        if plain.waiting_on == "validators":
            quiet = overdue_verdicts(state, now, self._began, self._coordinator.entered)
            if skipped := absent(state, now):  # guard: absent-is-told
                reason = f"{VERDICTS}{skipped}; {reason.removeprefix(VERDICTS)}"
            if quiet:  # guard: silent-is-told
                reason, remedy = f"{VERDICTS}{quiet}; {reason.removeprefix(VERDICTS)}", SILENT_REMEDY
            elif slow := slow_check(state, now, self._began, self._coordinator.entered):
                reason = f"{VERDICTS}{slow}; {reason.removeprefix(VERDICTS)}"
        if state.phase == "running" and plain.waiting_on == "workers":
            quiet, may_end = self._silent_workers()
            if quiet:  # guard: silent-worker-is-told
                who, _, rest = reason.partition(": ")
                reason, remedy = f"{who}: {quiet}; {rest}", remedy or ("" if may_end else WORKER_REMEDY)
            if not any(one.role == "worker" for key in self._coordinator.heard if (one := state.members.get(key))):
                reason = reason.replace(ALL_GONE, "; no worker has come back since the host started")
            reason = f"{reason}{waiting_after_lapses(state, now)}"
        if stopped := self._coordinator.stop_reports.waited_for(state, state.main):  # guard: stops-are-told
            reason = f"{reason}; {stopped}"
        if state.phase == "running" and (slow := self._coordinator.stage.slow_turn()):
            reason, plain = f"{slow}; {reason}", replace(plain, waiting_on="host")
        if state.phase == "paused" and state.pause_cause.startswith(FAULTS) and (task := self._faulted_task()):
            reason = f"{reason}; all of {task}: repair it, or leave it out with envs.tasks of a new run"
        if flat and state.phase != "paused":
            reason = f"{reason}; {flat}"
        waiting_s = 0.0 if plain.waiting_on == "nothing" else max(0.0, now - self._waiting[1])
        return replace(plain, waiting_for=reason, remedy=remedy, waiting_s=waiting_s, alarms=self.alarms())

    def _faulted_task(self) -> str:
        """The one task of all rollouts on which the environment failed that paused the run; empty if there are several."""
        state, tasks = self._coordinator.state, set[str]()
        if self._blamed[0] == state.seq:
            return self._blamed[1]
        for record in state.main.versions.values():
            for number, slot in record.slots.items():
                if not slot.faults or len(tasks) > 1:
                    continue
                lease = self._coordinator.wire_lease(state.lease_of(state.submissions[slot.submission]))
                tasks |= {
                    f"task {one.task} of {one.env}" for block in lease.blocks for one in block.slots
                    if one.slot == number and state.pause_cause.startswith(f"{FAULTS}{one.env} ")
                }  # fmt: skip
        self._blamed = state.seq, tasks.pop() if len(tasks) == 1 else ""
        return self._blamed[1]

    def alarms(self) -> tuple[t.StandingAlarm, ...]:
        """Alarms that stand, without the nodes that they are about."""
        found = [t.StandingAlarm(one.cause, one.severity, one.since) for one in self._alarms.read()]
        return tuple(dict.fromkeys(found))[:MAX_STANDING_ALARMS]

    def with_solve_rates(self, batch: t.Batch) -> t.Batch:
        """A batch with what its groups, and those left out of it, showed of each environment."""
        return replace(batch, solved=self._solve_rates.of_step(batch.step))

    def state_hash(self) -> t.StateHash:
        """What a replay must give at the newest event; at an older one if hashing takes long and was done lately."""
        began, known = self._coordinator.clock(), self._hashed
        # guard: seldom-hashed
        if known is not None and (known.head == self._coordinator.state.head or began < self._hash_again_at):
            return known
        self._hashed = t.StateHash(
            self._coordinator.state.seq, self._coordinator.state.head, state_hash(self._coordinator.state)
        )
        self._hash_again_at = began + (self._coordinator.clock() - began) / HASHING_SHARE
        return self._hashed

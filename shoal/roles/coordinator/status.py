"""Solve rates of each environment, of the groups that were accepted between two batches: measured in every run.

The desk has the links of versions in use, so it knows the task of each slot before the log does. Nothing is decided by
these figures, and a restart loses those of one step: draws that follow solve rates count in `ledger/task_difficulty`.
"""

from collections.abc import Mapping
from itertools import islice

from msgspec import UNSET
from msgspec.structs import replace

from shoal.alarms import StandingAlarms
from shoal.ledger.batch_selection import blocks_in_the_way, groups_in_flight, is_settled, next_members, usable
from shoal.ledger.batches import BatchFormed, GroupAccepted, groups_beyond_share
from shoal.ledger.errors import Refused
from shoal.ledger.event import Entry
from shoal.ledger.fault_rate import FAULTS, fault_remedy
from shoal.ledger.hints import (
    ADMIT_REMEDY,
    ALARM_REMEDY,
    NO_LEASE,
    SILENT_REMEDY,
    WORKER_REMEDY,
    no_signal_remedy,
    split_remedy,
)
from shoal.ledger.lease_granting import without_signal
from shoal.ledger.records import NodeRecord
from shoal.ledger.run import NO_SIGNAL
from shoal.ledger.slot_draws import slot_of, table_of
from shoal.ledger.state import State, state_hash
from shoal.ledger.task_difficulty import solve_rate
from shoal.ledger.validator_turns import absent, duration_text, overdue, overdue_verdicts, silent, slow_check
from shoal.protocol import messages as t
from shoal.protocol.branching import continued_slot, is_continued_slot
from shoal.protocol.constants import LONG_POLL_S, MAX_NODES, MAX_STANDING_ALARMS, PROTOCOL_VERSION
from shoal.protocol.group_rewards import fault_indices, without_faults
from shoal.protocol.messages import SolveRate
from shoal.protocol.tolerances import needs_of
from shoal.roles.coordinator.coordinator import Coordinator

KEPT = 8
"""Batches whose figures are remembered: the trainer may ask for one again."""


class SolveRates:
    """Follows a desk's log."""

    def __init__(self, desk: Coordinator, solved: Mapping[str, float]) -> None:
        """`solved` is the least reward of a solved rollout, by label."""
        self._desk, self._solved = desk, solved
        self._since: dict[str, list[float]] | None = {} if not desk.state.accepted_groups else None
        """Solve rates of groups since the last batch, by label; None until there is one after a restart."""
        self._by_step: dict[int, dict[str, SolveRate]] = {}
        desk.book.watch(self._see)

    def of_step(self, step: int) -> dict[str, SolveRate]:
        """Figures of the groups accepted for a step, by label; empty if they were forgotten."""
        return self._by_step.get(step, {})

    def _see(self, entries: list[Entry]) -> None:
        for body in (entry.body for entry in entries):
            if isinstance(body, GroupAccepted) and self._since is not None:
                if is_continued_slot(body.slot, self._desk.state.rules.block_groups):
                    continue
                stream, link = self._desk.state.streams[body.stream], self._desk.slot_links[body.version + 1]
                label = slot_of(self._desk.state, stream, body.version, body.slot, link).env
                rewards = without_faults(body.rewards, fault_indices(body.faults))
                if rewards:
                    self._since.setdefault(label, []).append(solve_rate(rewards, self._solved.get(label, 1.0)))
            elif isinstance(body, BatchFormed):
                if self._since is not None:
                    self._keep(body.step, self._since)
                self._since = {}

    def _keep(self, step: int, rates: Mapping[str, list[float]]) -> None:
        state = self._desk.state
        table = table_of(state, state.main, state.main.version)
        self._by_step[step] = {
            env.label: SolveRate(sum(own) / len(own) if own else None, len(own), env.weight)
            for env in table
            for own in [rates.get(env.label, [])]
        }
        while len(self._by_step) > KEPT:
            del self._by_step[min(self._by_step)]


# --- The run's notice board ---
#
# What anyone may read about it, and what it waits for.
#
# It turns the state into messages of the wire, and changes nothing.


VERDICTS = "validators: "
"""How a wait for verdicts begins."""

NOT_WAITING = "nothing: the run has ended"

WORKERS = "workers: ", "other workers: "
"""How a wait for workers begins."""

ALL_GONE = "; all workers have left or were removed"

SILENT_AFTER_S = 2 * LONG_POLL_S + 5.0
"""A worker that waits for a lease asks again after a long poll, and at most as long a wait that its answer names. One that
asked for nothing for longer is silent."""

MAX_SILENT = 2
"""Silent workers that a wait names."""

HASHING_SHARE = 0.02
"""Maximum fraction of the coordinator's time spent hashing its state for `GET /v1/state`."""


class StatusBoard:
    """What anyone may read about a desk's run."""

    def __init__(self, desk: Coordinator) -> None:
        self._desk, self._solve_rates = desk, SolveRates(desk, desk.solved)
        self._began = desk.clock()
        self._waiting, self._alarms = ("", self._began), StandingAlarms(desk.alarms)
        """What is waited for, and since when."""
        self._hashed: t.StateHash | None = None
        self._hash_again_at = 0.0
        self._blamed = -1, ""
        """An event's number, and what `_faulted_task` found then."""

    def info(self) -> t.RunInfo:
        """The run's description."""
        state = self._desk.state
        return t.RunInfo(
            run=state.run, name=state.name, protocol=PROTOCOL_VERSION, run_key=state.run_key,
            trainer_key=state.trainer_key, head=state.head, chain_end=state.chain_end, envs=state.envs,
            sampling=state.sampling, rules=state.rules, phase=state.phase,  # type: ignore[arg-type]
            version=state.main.version, rules_version=state.law.version,
            needs=needs_of(self._desk.needs_transformers, self._desk.has_adapter, self._desk.has_coded_base),
            origin=self._desk.origin(),
            root_key=state.root_key or "", publishers=state.named or None,
        )  # fmt: skip

    def nodes(self, after: str = "") -> list[t.NodeState]:
        """At most `MAX_NODES` members in the order in which they joined, from the one after `after`. Raises `Refused`."""
        keys = iter(self._desk.state.members)
        if after and after not in keys:  # the search also drops it and all before it
            raise Refused("unknown", f"no node {after[:16]} in this run")
        page = [self._desk.state.members[key] for key in islice(keys, MAX_NODES)]  # guard: page-of-nodes
        at_work, forked = self._at_work() | self._punctual(), self._desk.forked
        return [
            replace(node_state(one), silent_s=self._silent_s(one, at_work), forked=one.key in forked) for one in page
        ]

    def _at_work(self) -> set[str]:
        """Workers with a lease that they may still be at work on."""
        leases, now = map(self._desk.state.leases.__getitem__, self._desk.state.open_leases), self._desk.clock()
        return {lease.worker for lease in leases if lease.soft > now}

    def _punctual(self) -> set[str]:
        """Validators that owe no verdict and missed no turns."""
        state, now = self._desk.state, self._desk.clock()
        return {*state.judges()} - silent(state, now) - overdue(state, now, self._began, self._desk.entered).keys()

    def _silent_s(self, member: NodeRecord, at_work: set[str]) -> float:
        """For how long a node has asked for nothing, although it is not `at_work`; 0 if it has not been silent for long, or
        left."""
        now = self._desk.clock()
        silent_s = now - max(self._began, self._desk.heard.get(member.key, 0.0))
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
        state = self._desk.state
        here = [one for one in state.members.values() if one.role == "worker" and not one.left]
        at_work = self._at_work()
        silent = {one.key: silent_s for one in here if (silent_s := self._silent_s(one, at_work))}
        holders = {state.leases[name].worker for name in state.open_leases}
        if len(silent) < sum(one.standing != "kicked" for one in here):
            silent = {key: silent_s for key, silent_s in silent.items() if key in holders}
        named = [f"{state.members[key].name} ({key[:12]}) silent for {duration_text(s)}" for key, s in silent.items()]
        more = f" and {len(named) - MAX_SILENT} more" if len(named) > MAX_SILENT else ""
        return ", ".join(named[:MAX_SILENT]) + more, not holders.isdisjoint(silent)

    def status(self) -> t.Status:
        """How far the run is, and what it waits for."""
        state = self._desk.state
        reason, flat = waiting_for(state), without_signal(state, state.main)
        same = f"{reason}, after {state.main.version}"
        if state.phase == "paused":
            same = f"paused: {state.pause_cause}"
        elif flat and state.phase == "running":
            same = "no signal"
        if same != self._waiting[0]:  # by an event: the newest, if we were asked since the one before it
            self._waiting = (same, max(self._began, state.time))
        cause, remedy = split_remedy(reason)
        reason = cause if remedy else reason
        if (full := self._desk.over_quota) and state.phase == "running":  # guard: quota-is-told
            reason = f"{reason}; {NO_LEASE}: {full}"
        if behind := self._desk.clock_behind():  # guard: clock-is-told
            reason = f"{reason}; {behind}"
        if reason.startswith(VERDICTS):
            quiet = overdue_verdicts(state, self._desk.clock(), self._began, self._desk.entered)
            if skipped := absent(state, self._desk.clock()):  # guard: absent-is-told
                reason = f"{VERDICTS}{skipped}; {reason.removeprefix(VERDICTS)}"
            if quiet:  # guard: silent-is-told
                reason, remedy = f"{VERDICTS}{quiet}; {reason.removeprefix(VERDICTS)}", SILENT_REMEDY
            elif slow := slow_check(state, self._desk.clock(), self._began, self._desk.entered):
                reason = f"{VERDICTS}{slow}; {reason.removeprefix(VERDICTS)}"
        if state.phase == "running" and reason.startswith(WORKERS):
            quiet, may_end = self._silent_workers()
            if quiet:  # guard: silent-worker-is-told
                who, _, rest = reason.partition(": ")
                reason, remedy = f"{who}: {quiet}; {rest}", remedy or ("" if may_end else WORKER_REMEDY)
            if not any(one.role == "worker" for key in self._desk.heard if (one := state.members.get(key))):
                reason = reason.replace(ALL_GONE, "; no worker has come back since the host started")
            reason = f"{reason}{_waiting_after_lapses(state, self._desk.clock())}"
        if stopped := self._desk.stop_reports.waited_for(state, state.main):  # guard: stops-are-told
            reason = f"{reason}; {stopped}"
        if state.phase == "running" and (slow := self._desk.stage.slow_turn()):
            reason = f"{slow}; {reason}"
        if state.phase == "paused" and state.pause_cause.startswith(FAULTS) and (task := self._faulted_task()):
            reason = f"{reason}; all of {task}: repair it, or leave it out with envs.tasks of a new run"
        if flat and state.phase != "paused":
            reason = f"{reason}; {flat}"
        if remedy:
            reason = f"{reason}. {remedy}"
        return t.Status(
            name=state.name, phase=state.phase, version=state.main.version, steps=state.rules.steps,
            accepted=state.accepted_groups, refused=state.refused, in_flight=groups_in_flight(state, state.main),
            pending=len(state.pending) + len(state.rechecks), waiting_for=reason,
            waiting_s=0.0 if reason.startswith(NOT_WAITING) else max(0.0, self._desk.clock() - self._waiting[1]),
            flat_groups=state.main.flat, flat_reward=state.main.mean_flat_reward,
            no_signal=flat, unbegun_groups=state.main.unbegun or 0, unbegun_cause=state.main.unbegun_cause or "",
            pause_cause=state.pause_cause, alarms=self.alarms(), lr_factor=state.main.lr_factor(len(state.main.batches)),
            unjoined=tuple(key for key in state.validators if key not in state.members)[-MAX_NODES:],
        )  # fmt: skip

    def _faulted_task(self) -> str:
        """The one task of all rollouts on which the environment failed that paused the run; empty if there are several."""
        state, tasks = self._desk.state, set[str]()
        if self._blamed[0] == state.seq:
            return self._blamed[1]
        for record in state.main.versions.values():
            for number, slot in record.slots.items():
                if not slot.faults or len(tasks) > 1:
                    continue
                lease = self._desk.wire_lease(state.lease_of(state.submissions[slot.submission]))
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
        began, known = self._desk.clock(), self._hashed
        # guard: seldom-hashed
        if known is not None and (known.head == self._desk.state.head or began < self._hash_again_at):
            return known
        self._hashed = t.StateHash(self._desk.state.seq, self._desk.state.head, state_hash(self._desk.state))
        self._hash_again_at = began + (self._desk.clock() - began) / HASHING_SHARE
        return self._hashed


def waiting_for(state: State) -> str:
    """Who or what the run waits for, as text; of workers also how many cannot work now."""
    awaited = _awaited(state)
    return f"{awaited}{_out_of_work(state)}" if awaited.startswith(WORKERS) else awaited


def _out_of_work(state: State) -> str:
    """What is said of workers that get no leases now, if there are any."""
    workers = [node for node in state.members.values() if node.role == "worker"]
    here = [node for node in workers if not node.left and node.standing != "kicked"]
    if workers and not here:
        return ALL_GONE
    out = sum(node.standing == "quarantined" for node in here)
    return f"; {out} of {len(here)} workers {'is' if out == 1 else 'are'} quarantined" if out else ""


def _waiting_after_lapses(state: State, now: float) -> str:
    """What is said of workers that get no lease yet because theirs lapsed in a row, if there are any."""
    held, first_s = {state.leases[name].worker for name in state.open_leases}, state.rules.lease_s
    here = [one for one in state.members.values() if one.role == "worker" and not one.left and one.standing != "kicked"]
    ends = [one.dropped_at + state.law.lapse_wait_s(one.dropped, first_s) for one in here if one.key not in held]
    if not (left_s := [end - now for end in ends if end > now]):
        return ""
    num = len(left_s)
    return (
        f"; {num} of {len(here)} workers {'waits' if num == 1 else 'wait'} for a lease, because theirs lapsed in a row: "
        f"the first {duration_text(min(left_s))} more at most"
    )


def _awaited(state: State) -> str:
    if state.phase == "ended":
        return f"{VERDICTS}{_to_judge(state)}" if state.pending else NOT_WAITING
    if state.phase == "paused" and state.pause_cause.startswith(FAULTS):
        return f"the host: {state.pause_cause}. {fault_remedy(state.pause_cause)}"
    if state.phase == "paused" and state.pause_cause not in ("", NO_SIGNAL):
        why = f"the {state.pause_cause} paused the run, as its run file says"
        return f"the host: {why}. {ALARM_REMEDY}"
    if state.phase == "paused" and (flat := without_signal(state, state.main)):
        stream = state.main
        return f"the host: {flat}. {no_signal_remedy(stream.flat, stream.unbegun or 0, stream.unbegun_cause or '')}"
    if state.phase == "paused":
        return "the host: the run is paused"
    if state.main.version < 0:
        return "the trainer: the first version"
    if state.main.version in state.main.batches:
        return "the trainer: the next step"
    need, have = state.rules.batch_groups, len(next_members(state, state.main))
    if state.pending:
        judged = f"{have} of {need} groups for the next step"
        if not state.validators:
            return f"the host: {_to_judge(state)} ({judged}), and no validator is admitted. {ADMIT_REMEDY}"
        return f"{VERDICTS}{_to_judge(state)} ({judged})"
    if state.phase == "draining":
        out = len(state.open_leases)
        return f"workers: {out} lease{'s' if out != 1 else ''} to finish, then the run ends"
    if not any(node.role == "worker" for node in state.members.values()):
        return "workers: none has joined yet"
    open_ = sum(not is_settled(state, state.main, place) for place in usable(state, state.main))
    if have + open_ >= need and open_:
        return f"workers: continuations of {open_} groups, for the next step"
    held = blocks_in_the_way(state, state.main)
    if held:
        left = f"{len(held)} block{'s' if len(held) > 1 else ''} of version {held[0][0]}"
        return f"workers: {left}, of which the next step is the last that may learn"
    surplus = groups_beyond_share(state, state.main)
    if surplus:
        return (
            f"other workers: {have} of {need} groups for the next step, and {surplus} more of workers that "
            "have filled their share (verify.worker_share)"
        )
    return f"workers: {have} of {need} groups for the next step"


def _to_judge(state: State) -> str:
    waiting = len(state.pending)
    return f"{waiting} submission{'s' if waiting != 1 else ''} to judge"


def node_state(node: NodeRecord) -> t.NodeState:
    """A node as the wire shows it."""
    return t.NodeState(
        key=node.key, role=node.role, name=node.name, standing=node.standing,  # type: ignore[arg-type]
        credits=node.credits, accepted=node.accepted, refused=node.refused, lapsed=node.lapsed, reasons=node.reasons,
        last_reason=node.last_reason, vested=node.vested, leases=node.leases, influence=node.influence,
        stale=node.stale, left=node.left, given=node.given, unfilled=node.unfilled,
    )  # fmt: skip


def batch_of(state: State, step: int) -> t.Batch | None:
    """The batch of a step as the trainer reads it, or None before it is formed."""
    if step not in state.main.batches:
        return None
    members = []
    for version, number in state.main.batches[step]:
        slots = state.main.versions[version].slots
        slot, continued = slots[number], slots.get(continued_slot(number, state.rules.block_groups))
        rewards = continued.rewards if continued is not None else ()
        place = version, number, slot.submission, slot.index
        failed = (continued.faults or ()) if continued is not None else ()
        members.append(
            t.BatchGroup(*place, slot.digest, slot.rewards, rewards, slot.steps or (), slot.faults or (), failed)
        )
    factor = state.main.lr_factor(step)
    return t.Batch(step, tuple(members), lr_factor=UNSET if factor == 1.0 else factor)

"""The run's notice board: what anyone may read about it, and what it waits for.

Called by `api`. It turns the state into messages of the wire, and changes nothing.
"""

from itertools import islice

from msgspec import UNSET
from msgspec.structs import replace

from shoal.alarms import StandingAlarms
from shoal.ledger.answers import Refused
from shoal.ledger.facts.run import NO_SIGNAL
from shoal.ledger.next_batch import blocks_in_the_way, is_settled, next_members, usable
from shoal.ledger.rules.batches import groups_beyond_share
from shoal.ledger.rules.leases import without_signal
from shoal.ledger.state import State, state_hash
from shoal.ledger.state_records import Member
from shoal.ledger.supply import groups_in_flight
from shoal.ledger.turns import absent
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_NODES, MAX_STANDING_ALARMS, PROTOCOL_VERSION
from shoal.protocol.continuations import continued_slot
from shoal.protocol.needs import needs_of
from shoal.roles.coordinator.desk import FULL, Desk
from shoal.roles.coordinator.solved import SolveRates

HASHING_SHARE = 0.02
"""Maximum fraction of the coordinator's time spent hashing its state for `GET /v1/state`."""


class Board:
    """What anyone may read about a desk's run."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._solve_rates = desk, SolveRates(desk, desk.solved)
        self._waiting, self._alarms = ("", desk.clock()), StandingAlarms(desk.alarms)
        self._hashed: t.StateHash | None = None
        self._hash_again_at = 0.0

    def info(self) -> t.RunInfo:
        """The run's description."""
        state = self._desk.state
        return t.RunInfo(
            run=state.run, name=state.name, protocol=PROTOCOL_VERSION, run_key=state.run_key,
            trainer_key=state.trainer_key, head=state.head, chain_end=state.chain_end, envs=state.envs,
            sampling=state.sampling, rules=state.rules, phase=state.phase,  # type: ignore[arg-type]
            version=state.main.version, rules_version=state.law.version,
            needs=needs_of(
                state.rules, state.envs, state.sampling, self._desk.published_dtype, self._desk.needs_transformers,
                self._desk.has_adapter, self._desk.has_coded_base,
            ),
            origin=self._desk.origin(),
            root_key=state.root_key or "", publishers=state.named or None,
        )  # fmt: skip

    def nodes(self, after: str = "") -> list[t.NodeState]:
        """At most `MAX_NODES` members in the order in which they joined, from the one after `after`. Raises `Refused`."""
        keys = iter(self._desk.state.members)
        if after and after not in keys:  # the search also drops it and all before it
            raise Refused("unknown", f"no node {after[:16]} in this run")
        return [node_state(self._desk.state.members[key]) for key in islice(keys, MAX_NODES)]  # guard: page-of-nodes

    def status(self) -> t.Status:
        """How far the run is, and what it waits for."""
        state = self._desk.state
        reason, flat = waiting_for(state), without_signal(state, state.main)
        same = "no signal" if flat else reason
        if same != self._waiting[0]:
            self._waiting = (same, self._desk.clock())
        if self._desk.blobs.size_bytes > self._desk.quota_bytes and state.phase == "running":  # guard: quota-is-told
            reason = f"{reason}; no lease is granted: {FULL.format(self._desk.quota_bytes // 1_000_000)}"
        if behind := self._desk.clock_behind():  # guard: clock-is-told
            reason = f"{reason}; {behind}"
        if skipped := absent(state, self._desk.clock()):  # guard: absent-is-told
            reason = f"{reason}; {skipped}"
        if flat and state.phase != "paused":
            reason = f"{reason}; {flat}"
        return t.Status(
            name=state.name, phase=state.phase, version=state.main.version, steps=state.rules.steps,
            accepted=state.accepted_groups, refused=state.refused, in_flight=groups_in_flight(state, state.main),
            pending=len(state.pending) + len(state.rechecks), waiting_for=reason,
            waiting_s=self._desk.clock() - self._waiting[1],
            flat_groups=state.main.flat, flat_reward=state.main.flat_reward / max(1, state.main.flat),
            pause_cause=state.pause_cause, alarms=self.alarms(),
        )  # fmt: skip

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
    """Who or what the run waits for, as text."""
    if state.phase == "ended":
        return (
            f"validators: {len(state.pending)} submissions to judge" if state.pending else "nothing: the run has ended"
        )
    if state.phase == "paused" and state.pause_cause not in ("", NO_SIGNAL):
        why = f"the {state.pause_cause} paused the run, as its run file says"
        return f"the host: {why}. Look into it, then `shoal admin resume` or `shoal admin drain`"
    if state.phase == "paused" and (flat := without_signal(state, state.main)):
        return f"the host: {flat}. Look at some of them, then `shoal admin resume` or `shoal admin drain`"
    if state.phase == "paused":
        return "the host: the run is paused"
    if state.main.version < 0:
        return "the trainer: the first version"
    if state.main.version in state.main.batches:
        return f"the trainer: step {state.main.version}"
    need, have = state.rules.batch_groups, len(next_members(state, state.main).all)
    if state.pending:
        judged = f"{have} of {need} groups for step {state.main.version}"
        return f"validators: {len(state.pending)} submissions to judge ({judged})"
    if state.phase == "draining":
        out = len(state.open_leases)
        return f"workers: {out} lease{'s' if out != 1 else ''} to finish, then the run ends"
    if not any(node.role == "worker" for node in state.members.values()):
        return "workers: none has joined yet"
    open_ = sum(not is_settled(state, state.main, place) for place in usable(state, state.main))
    if have + open_ >= need and open_:
        return f"workers: continuations of {open_} groups, for step {len(state.main.batches)}"
    held = blocks_in_the_way(state, state.main)
    if held:
        left = f"{len(held)} block{'s' if len(held) > 1 else ''} of version {held[0][0]}"
        return f"workers: {left}, of which step {len(state.main.batches)} is the last that may learn"
    surplus = groups_beyond_share(state, state.main)
    if surplus:
        return (
            f"other workers: {have} of {need} groups for step {state.main.version}, and {surplus} more of workers that "
            "have filled their share (verify.worker_share)"
        )
    return f"workers: {have} of {need} groups for step {state.main.version}"


def node_state(node: Member) -> t.NodeState:
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
        members.append(t.BatchGroup(*place, slot.digest, slot.rewards, rewards, slot.steps or ()))
    factor = state.main.lr_factor(step)
    return t.Batch(step, tuple(members), lr_factor=UNSET if factor == 1.0 else factor)

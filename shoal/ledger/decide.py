"""The rules of a run: which events a command leads to. Pure: time and randomness come inside the command.

Called by the book, the log's only writer. `decide` answers a command from outside; `follow` says what the state
alone then demands (batches, voids, the end), and is repeated until it is silent. Neither changes the state.
"""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from shoal.ledger import events as ev
from shoal.ledger.commands import (
    Admin,
    AskLease,
    Create,
    Enter,
    Judge,
    Publish,
    Reconfigure,
    Refused,
    ReturnLeases,
    Submit,
    Tick,
    Wait,
)
from shoal.ledger.state import Lease, Node, State
from shoal.protocol.constants import MAX_LEASE_BLOCKS, MAX_OPEN_LEASES
from shoal.protocol.identity import is_public_key
from shoal.protocol.types import GroupVerdict, Verdict

LEASE_TARGET_S = 20.0
"""A lease is sized to take a worker about this long, by its measured speed."""
PROBATION_BLOCKS = 10
"""Blocks in a row that must be valid before a worker is audited at the run's rate. Fewer helps a sleeper."""
SOFT_FAILURES = 3
"""Refused submissions, soft ones included, from which on a worker is quarantined."""
MAX_QUARANTINE_S = 3600.0


@singledispatch
def decide(command: Any, state: State) -> list[ev.Body]:
    """Events that a command leads to. Raises `Refused` or `Wait`, in which case nothing happened."""
    raise AssertionError(f"no rule for {type(command).__name__}")


@decide.register
def _(command: Create, state: State) -> list[ev.Body]:
    assert state.seq < 0, "a run is created once"
    return [command.body]


@decide.register
def _(command: Enter, state: State) -> list[ev.Body]:
    join, node = command.join, state.nodes.get(command.key)
    if join.role == "validator" and command.key not in state.validators:
        raise Refused("not_admitted", f"validator {command.key[:12]} is not admitted: ask the host to run "
                      f"`shoal admin admit RUN {command.key}`")  # fmt: skip
    if join.role == "trainer" and command.key != state.trainer_key:
        raise Refused("not_admitted", f"{command.key[:12]} is not the trainer key of this run")
    if node and node.standing == "kicked":
        raise Refused("kicked", f"the host removed {node.name} ({command.key[:12]}) from this run")
    facts = (join.role, join.name, join.implementation, join.dtype, join.device)
    if node and facts == (node.role, node.name, node.implementation, node.dtype, node.device):
        return []
    if join.role == "worker" and join.dtype != state.law.dtype:
        raise Refused("wrong_dtype", f"this run samples in {state.law.dtype}, the worker offers {join.dtype}")
    return [ev.NodeJoined(command.key, *facts)]


@decide.register
def _(command: AskLease, state: State) -> list[ev.Body]:
    node = _member(state, command.key, "worker")
    _refuse_when_not_running(state)
    if node.standing == "quarantined":
        raise Wait(f"quarantined after a refused submission ({node.last_reason})", max(1.0, node.until - command.now))
    mine = state.open_leases_of(command.key)
    if any(lease.id not in command.holding for lease in mine):
        return []
    if len(mine) >= MAX_OPEN_LEASES:
        raise Wait(f"you hold {len(mine)} leases already", 1.0)
    if state.version < 0:
        raise Wait("the trainer has not published the first version yet", 1.0)
    room = groups_wanted(state)
    if room <= 0:
        raise Wait(f"enough groups are in flight for version {state.version}", 1.0)
    version, blocks = _blocks_to_lease(state, node, command.tokens_per_s, room)
    deadline = command.now + state.law.lease_s * len(blocks)
    return [ev.LeaseGranted(str(len(state.leases)), command.key, version, tuple(blocks), deadline)]


def _refuse_when_not_running(state: State) -> None:
    reasons = {
        "paused": ("the host paused the run", 5.0),
        "draining": ("the run is draining: no new work is given", 30.0),
        "ended": ("the run has ended", 60.0),
    }
    if state.phase in reasons:
        raise Wait(*reasons[state.phase])


def groups_wanted(state: State) -> int:
    """Groups that may still be leased: accepted and in flight stay below (max_staleness + 1) batches (DESIGN §2)."""
    law = state.law
    steps_left = law.steps - state.version
    wanted = min(law.max_staleness + 1, steps_left) * law.batch_groups
    next_step = len(state.batches)
    usable = sum(1 for version, _ in state.pool if next_step - version <= law.max_staleness)
    batched = (next_step - state.version) * law.batch_groups
    return wanted - usable - batched - groups_in_flight(state)


def groups_in_flight(state: State) -> int:
    """Groups leased, or sent and not yet judged, of versions that can still be learned from."""
    oldest = max(0, state.version - state.law.max_staleness)
    return state.law.block_groups * sum(
        block.status in ("leased", "submitted")
        for version in range(oldest, len(state.versions))
        for block in state.versions[version].blocks.values()
    )


def _blocks_to_lease(state: State, node: Node, tokens_per_s: float, room: int) -> tuple[int, list[int]]:
    """Blocks of one version: given back ones first, then new ones, as many as the worker's speed allows."""
    most = 1 if node.standing == "new" else _blocks_for_speed(state, tokens_per_s)
    workers = max(1, sum(other.role == "worker" and other.standing == "good" for other in state.nodes.values()))
    most = max(1, min(most, room // state.law.block_groups // workers, MAX_LEASE_BLOCKS))
    current = state.version
    if state.free:
        version = state.free[0][0]
        return version, [block for v, block in state.free if v == version][:most]
    first = len(state.versions[current].blocks)
    return current, list(range(first, first + most))


def _blocks_for_speed(state: State, tokens_per_s: float) -> int:
    if not state.accepted_groups:
        return 1
    tokens_per_block = state.block_tokens / state.accepted_groups * state.law.block_groups
    return max(1, int(tokens_per_s * LEASE_TARGET_S / max(1.0, tokens_per_block)))


@decide.register
def _(command: ReturnLeases, state: State) -> list[ev.Body]:
    node = _member(state, command.key, "worker")
    mine = state.open_leases_of(node.key)
    return [ev.LeaseLapsed(lease.id, "returned") for lease in mine if lease.id in command.leases]


@decide.register
def _(command: Submit, state: State) -> list[ev.Body]:
    node = _member(state, command.key, "worker")
    lease = state.leases.get(command.lease)
    if lease is None or lease.worker != command.key:
        raise Refused("not_yours", f"lease {command.lease} is not one of yours")
    if lease.submission:
        if lease.submission == command.digest:
            return []
        raise Refused("conflict", f"lease {lease.id} was filled by submission {lease.submission[:12]} already")
    if command.digest in state.submissions:
        raise Refused("conflict", f"submission {command.digest[:12]} was sent for another lease already")
    _refuse_superseded(state, lease)
    expected = len(lease.blocks) * state.law.block_groups
    if len(command.groups) != expected:
        raise Refused("malformed", f"lease {lease.id} has {expected} slots, the submission {len(command.groups)}")
    received = ev.SubmissionReceived(command.lease, command.key, command.digest, command.size_bytes, command.groups)
    rate = state.law.audit_rate if node.valid_blocks >= PROBATION_BLOCKS else 1.0
    drawn = zip(slots_of(state, lease), command.draws, strict=True)
    audited = tuple(slot for slot, draw in drawn if draw < rate)
    return [received, ev.AuditDrawn(command.digest, audited)]


def _refuse_superseded(state: State, lease: Lease) -> None:
    """A late submission is taken as long as nobody else was given its blocks and it can still be learned from."""
    if state.phase == "ended":
        raise Refused("superseded", "the run has ended: nothing more is learned from rollouts")
    if state.version - lease.version > state.law.max_staleness:
        raise Refused("superseded", f"lease {lease.id} is for version {lease.version}, too old now: the latest is "
                      f"{state.version} and max_staleness is {state.law.max_staleness}")  # fmt: skip
    blocks = state.versions[lease.version].blocks
    if any(blocks[i].lease != lease.id or blocks[i].status not in ("leased", "free") for i in lease.blocks):
        raise Refused("superseded", f"lease {lease.id} lapsed and its blocks were leased again")


def slots_of(state: State, lease: Lease) -> list[int]:
    """Slots of a lease, in the order of its groups."""
    per_block = state.law.block_groups
    return [slot for block in lease.blocks for slot in range(block * per_block, (block + 1) * per_block)]


@decide.register
def _(command: Judge, state: State) -> list[ev.Body]:
    _member(state, command.key, "validator")
    verdict, submission = command.verdict, state.submissions.get(command.verdict.submission)
    if submission is None:
        raise Refused("unknown", f"no submission {verdict.submission[:12]}")
    if submission.decided:
        return []
    lease = state.leases[submission.lease]
    _refuse_malformed_verdict(state, lease, submission.audited, verdict)
    by_block = _by_block(state, lease, verdict.groups)
    accepted = tuple(i for i, groups in by_block.items() if all(g.outcome in ("accept", "void") for g in groups))
    refused = tuple(i for i in lease.blocks if i not in accepted)
    events: list[ev.Body] = [ev.VerdictGiven(submission.digest, command.key, verdict.groups)]
    events.append(ev.Decision(submission.digest, accepted, refused))
    order = slots_of(state, lease)
    for block in accepted:
        for group in by_block[block]:
            index = order.index(group.slot)
            if group.outcome == "void":
                events.append(ev.SlotVoid(lease.version, (group.slot,), f"environment: {group.detail}"))
                continue
            digest = submission.groups[index]
            events.append(
                ev.GroupAccepted(
                    lease.version, group.slot, submission.digest, index, digest, group.tokens, group.rewards
                )
            )
            events.append(ev.Credit(lease.worker, lease.version, group.slot, group.tokens))
    if refused:
        events += _penalty(state, lease, verdict, command.now)
    return events


def _refuse_malformed_verdict(state: State, lease: Lease, audited: tuple[int, ...], verdict: Verdict) -> None:
    if tuple(group.slot for group in verdict.groups) != tuple(slots_of(state, lease)):
        raise Refused("malformed", "a verdict names every slot of the lease once, in order")
    for group in verdict.groups:
        if group.outcome != "accept":
            continue
        if len(group.rewards) != state.law.group_size or group.tokens < 0:
            raise Refused("malformed", f"slot {group.slot}: an accepted group has {state.law.group_size} rewards")
        if group.slot in audited and not group.audited:
            raise Refused("malformed", f"slot {group.slot} was drawn for audit but not audited")


def _by_block(state: State, lease: Lease, groups: tuple[GroupVerdict, ...]) -> dict[int, list[GroupVerdict]]:
    """A block is generated as one batch, so it is accepted whole or not at all."""
    size = state.law.block_groups
    return {block: list(groups[i * size : (i + 1) * size]) for i, block in enumerate(lease.blocks)}


def _penalty(state: State, lease: Lease, verdict: Verdict, now: float) -> Iterator[ev.Body]:
    """Quarantine after a hard refusal or several soft ones, longer each time; the leases in hand are given back."""
    node = state.nodes[lease.worker]
    failures = node.failures + 1
    first = next(group for group in verdict.groups if group.outcome in ("soft", "hard"))
    if not any(group.outcome == "hard" for group in verdict.groups) and failures % SOFT_FAILURES:
        return
    seconds = float(state.config.get("verify", {}).get("quarantine_s", 30.0))
    until = now + min(MAX_QUARANTINE_S, seconds * 2.0 ** min(failures - 1, 20))
    for held in state.open_leases_of(lease.worker):
        yield ev.LeaseLapsed(held.id, "quarantine")
    yield ev.NodeQuarantined(lease.worker, until, f"{first.check}: {first.detail}")


@decide.register
def _(command: Publish, state: State) -> list[ev.Body]:
    if command.key != state.trainer_key:
        raise Refused("not_admitted", f"{command.key[:12]} is not the trainer key of this run")
    if command.version <= state.version:
        if state.versions[command.version].root == command.root:
            return []
        raise Refused("conflict", f"version {command.version} is published with another weights root: a version is "
                      "published once; load it instead of rebuilding it")  # fmt: skip
    if command.version != state.version + 1:
        raise Refused("conflict", f"the next version is {state.version + 1}, not {command.version}")
    if command.version > 0 and command.version - 1 not in state.batches:
        raise Refused("conflict", f"version {command.version} needs batch {command.version - 1}, which is not formed")
    events: list[ev.Body] = [ev.CheckpointPublished(command.version, command.root, command.manifest)]
    ended = command.version >= state.law.steps
    retired = command.version if ended else command.version - state.law.max_staleness - 1
    for version, (link, audit_link) in sorted(command.links.items()):
        unrevealed = version == command.version or not state.versions[version].revealed
        if version <= retired and unrevealed:
            events.append(ev.LinkRevealed(version, link, audit_link))
    return events


@decide.register
def _(command: Admin, state: State) -> list[ev.Body]:
    action, key = command.action, command.key
    if state.phase == "ended":
        raise Refused("ended", "the run has ended")
    phases = {"pause": "paused", "resume": "running", "drain": "draining"}
    if action in phases:
        return [] if state.phase == phases[action] else [ev.RulesChanged(phase=phases[action])]
    if action == "admit":
        if not is_public_key(key):
            raise Refused("malformed", f"{key[:70]!r} is no public key of 64 hex digits: `shoal validate` prints it")
        return [] if key in state.validators else [ev.RulesChanged(admitted_validator=key)]
    if action == "kick":
        matches = [k for k, node in state.nodes.items() if key and (k.startswith(key) or node.name == key)]
        if len(matches) != 1:
            raise Refused("unknown", f"{len(matches)} nodes match {key!r}: give a name or the start of one key")
        held = [ev.LeaseLapsed(lease.id, "kicked") for lease in state.open_leases_of(matches[0])]
        return [*held, ev.RulesChanged(kicked=matches[0])]
    raise Refused("malformed", f"unknown action {action!r}: pause, resume, drain, kick or admit")


@decide.register
def _(command: Reconfigure, state: State) -> list[ev.Body]:
    if command.config == state.config:
        return []
    return [ev.RulesChanged(config=command.config, steps=command.steps, lease_s=command.lease_s)]


@decide.register
def _(command: Tick, state: State) -> list[ev.Body]:
    late = [i for i in state.open_leases if state.leases[i].deadline < command.now]
    served = [n for n in state.nodes.values() if n.standing == "quarantined" and n.until <= command.now]
    return [*(ev.LeaseLapsed(i, "deadline") for i in late), *(ev.NodeRestored(node.key) for node in served)]


def _member(state: State, key: str, role: str) -> Node:
    node = state.nodes.get(key)
    if node is None or node.role != role:
        raise Refused("not_joined", f"{key[:12]} has not joined as a {role}: POST /v1/nodes first")
    if node.standing == "kicked":
        raise Refused("kicked", f"the host removed {node.name} ({key[:12]}) from this run")
    return node


def follow(state: State) -> list[ev.Body]:
    """What the state alone demands next; silent when nothing."""
    if state.seq < 0 or state.version < 0 or state.phase == "ended":
        return []
    if state.version >= state.law.steps or _has_drained(state):
        return [ev.RunEnded(state.version)]
    return _void_stale(state) or _form_batch(state)


def _has_drained(state: State) -> bool:
    """A draining run ends when nothing is out or unjudged and the trainer has used every batch that could be formed."""
    at_work = state.open_leases or state.pending or state.version in state.batches
    return state.phase == "draining" and not at_work and not _form_batch(state)


def _void_stale(state: State) -> list[ev.Body]:
    """Blocks given back whose version is too old to be leased again: their slots come to nothing."""
    size = state.law.block_groups
    old = [place for place in state.free if state.version - place[0] >= max(1, state.law.max_staleness)]
    if not old:
        return []
    version = old[0][0]
    blocks = [block for v, block in old if v == version]
    return [ev.SlotVoid(version, tuple(slot for i in blocks for slot in range(i * size, (i + 1) * size)), "stale")]


def _form_batch(state: State) -> list[ev.Body]:
    step, law = len(state.batches), state.law
    if step >= law.steps or step > state.version + law.max_staleness:
        return []
    if law.max_staleness == 0:
        members = _first_by_slot(state, step)
    else:
        members = [place for place in state.pool if step - place[0] <= law.max_staleness][: law.batch_groups]
    if len(members) < law.batch_groups:
        return []
    return [ev.BatchFormed(step, tuple(sorted(members)))]


def _first_by_slot(state: State, version: int) -> list[tuple[int, int]]:
    """Synchronous runs: the first groups with signal by slot number, once every lower slot is final."""
    members: list[tuple[int, int]] = []
    slots = state.versions[version].slots
    slot = 0
    while slot in slots and len(members) < state.law.batch_groups:
        if slots[slot].status == "signal":
            members.append((version, slot))
        slot += 1
    return members

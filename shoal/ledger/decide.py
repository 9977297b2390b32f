"""The rules of a run: which events a command leads to. Pure: time and randomness come inside the command.

Called by the book, the log's only writer. `decide` answers a command from outside; `follow` says what the state
alone then demands (leases closed, batches, voids, the end), and is repeated until it is silent. Neither changes the state.
"""

from collections import Counter
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from shoal.ledger import audits
from shoal.ledger import events as ev
from shoal.ledger.audits import groups_a_worker
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
)
from shoal.ledger.judging import judge, overdue, slots_of
from shoal.ledger.leasing import close_stale, grant, lapse_costs, usable
from shoal.ledger.state import Lease, Node, State
from shoal.protocol.identity import is_public_key


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
    if node and node.role != join.role:
        raise Refused("conflict", f"{command.key[:12]} joined as a {node.role}: for another role use another key")
    facts = (join.role, join.name, join.implementation, join.dtype, join.device)
    if node and facts == (node.role, node.name, node.implementation, node.dtype, node.device):
        return []
    if join.role == "worker" and join.dtype != state.law.dtype:
        raise Refused("wrong_dtype", f"this run samples in {state.law.dtype}, the worker offers {join.dtype}")
    return [ev.NodeJoined(command.key, *facts)]


@decide.register
def _(command: AskLease, state: State) -> list[ev.Body]:
    return grant(command, _member(state, command.key, "worker"), state)


@decide.register
def _(command: ReturnLeases, state: State) -> list[ev.Body]:
    node = _member(state, command.key, "worker")
    mine = {lease.id: lease for lease in state.open_leases_of(node.key)}
    back = [mine[name] for name in dict.fromkeys(command.leases) if name in mine]
    return [*(ev.LeaseLapsed(lease.id, "returned") for lease in back), *lapse_costs(state, back)]


@decide.register
def _(command: Submit, state: State) -> list[ev.Body]:
    lease = lease_to_fill(state, command.key, command.lease, command.digest)
    if lease.submission:
        return []
    expected = len(lease.blocks) * state.law.block_groups
    if len(command.groups) != expected:
        raise Refused("malformed", f"lease {lease.id} has {expected} slots, the submission {len(command.groups)}")
    received = ev.SubmissionReceived(command.lease, command.key, command.digest, command.size_bytes, command.groups)
    rate = audits.audit_rate(state.nodes[command.key].valid_blocks, state.law.audit_rate)
    drawn = zip(slots_of(state, lease), command.draws, strict=True)
    audited = tuple(slot for slot, draw in drawn if draw < rate)
    mean_influence = state.influence / state.accepted_groups if state.accepted_groups else 0.0
    judges = state.judges()
    order = tuple(key for key in command.order if key in judges)
    return [received, ev.AuditDrawn(command.digest, audited, rate, command.draws, mean_influence, order)]


def lease_to_fill(state: State, key: str, lease_id: str, digest: str) -> Lease:
    """The lease that a worker may fill with a submission, or has filled with this very one. Raises `Refused`.

    The coordinator also asks before it reads a submission's body.
    """
    _member(state, key, "worker")
    lease = state.leases.get(lease_id)
    if lease is None or lease.worker != key:
        raise Refused("not_yours", f"lease {lease_id} is not one of yours")
    if lease.submission and lease.submission != digest:
        raise Refused("conflict", f"lease {lease.id} was filled by submission {lease.submission[:12]} already")
    if not lease.submission and digest in state.submissions:
        raise Refused("conflict", f"submission {digest[:12]} was sent for another lease already")
    if not lease.submission:
        _refuse_superseded(state, lease)
    return lease


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


@decide.register
def _(command: Judge, state: State) -> list[ev.Body]:
    _member(state, command.key, "validator")
    return judge(command, state)


@decide.register
def _(command: Publish, state: State) -> list[ev.Body]:
    if command.key != state.trainer_key:
        raise Refused("not_admitted", f"{command.key[:12]} is not the trainer key of this run")
    if command.version <= state.version:
        published = state.versions[command.version]
        if published.root == command.root:  # signed again, or sent again
            again = ev.CheckpointPublished(command.version, command.root, command.manifest)
            return [] if published.manifest == command.manifest else [again]
        raise Refused("conflict", f"version {command.version} is published with another weights root: a version is "
                      "published once; load it instead of rebuilding it")  # fmt: skip
    if command.version != state.version + 1:
        raise Refused("conflict", f"the next version is {state.version + 1}, not {command.version}")
    if command.version > 0 and command.version - 1 not in state.batches:
        raise Refused("conflict", f"version {command.version} needs batch {command.version - 1}, which is not formed")
    events: list[ev.Body] = [ev.CheckpointPublished(command.version, command.root, command.manifest)]
    ended = command.version >= state.law.steps
    retired = command.version if ended else command.version - state.law.max_staleness - 1
    waiting = _unjudged(state)
    for version, (link, audit_link) in sorted(command.links.items()):
        unrevealed = version == command.version or not state.versions[version].revealed
        if version <= retired and unrevealed and version not in waiting:
            events.append(ev.LinkRevealed(version, link, audit_link))
    return events


def _unjudged(state: State) -> set[int]:
    """Versions with submissions to judge: their links tell a first voice whether a second will be drawn."""
    return {state.leases[state.submissions[name].lease].version for name in state.pending}


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
        named = [k for k, node in state.nodes.items() if key and (k.startswith(key) or node.name == key)]
        matches = [key] if key in state.nodes else named  # a name that is another's key does not shield it
        if len(matches) != 1:
            raise Refused("unknown", f"{len(matches)} nodes match {key!r}: give a name or the start of one key")
        held = [ev.LeaseLapsed(lease.id, "kicked") for lease in state.open_leases_of(matches[0])]
        return [*held, ev.RulesChanged(kicked=matches[0])]
    raise Refused("malformed", f"unknown action {action!r}: pause, resume, drain, kick or admit")


@decide.register
def _(command: Reconfigure, state: State) -> list[ev.Body]:
    if command.config == state.config:
        return []
    return [
        ev.RulesChanged(
            config=command.config, steps=command.steps, lease_s=command.lease_s,
            max_flat_groups=command.max_flat_groups,
        )
    ]  # fmt: skip


@decide.register
def _(command: Tick, state: State) -> list[ev.Body]:
    late = [state.leases[i] for i in state.open_leases if state.leases[i].deadline < command.now]
    served = [n for n in state.nodes.values() if n.standing == "quarantined" and n.until <= command.now]
    due = [
        *(ev.LeaseLapsed(lease.id, "deadline") for lease in late),
        *lapse_costs(state, late),
        *(ev.NodeRestored(node.key) for node in served),
    ]
    # What ends a submission reads the escrow that the events above change: it has the next tick for itself.
    return due or [*overdue(state, command.now)] or [*_reveal_rest(state, command.links)]


def _reveal_rest(state: State, links: dict[int, tuple[str, str]]) -> Iterator[ev.Body]:
    """An ended run publishes no further version: the secrets that are left come out when what they hide is judged."""
    if state.phase == "ended":
        waiting = _unjudged(state)
        for version, (link, audit_link) in sorted(links.items()):
            if not state.versions[version].revealed and version not in waiting:
                yield ev.LinkRevealed(version, link, audit_link)


def _member(state: State, key: str, role: str) -> Node:
    node = state.nodes.get(key)
    if node is None or node.role != role:
        raise Refused("not_joined", f"{key[:12]} has not joined as a {role}: POST /v1/nodes first")
    if node.standing == "kicked":
        raise Refused("kicked", f"the host removed {node.name} ({key[:12]}) from this run")
    if node.standing == "suspended":
        raise Refused("kicked", f"validator {node.name} ({key[:12]}) was at fault {node.failures} times and is asked no "
                      "more: ask the host to look into it")  # fmt: skip
    return node


def follow(state: State) -> list[ev.Body]:
    """What the state alone demands next; silent when nothing."""
    if state.seq < 0 or state.version < 0:
        return []
    if state.phase == "ended":
        return close_stale(state) or _vest_rest(state)
    if state.version >= state.law.steps or _has_drained(state):
        return [ev.RunEnded(state.version)]
    return close_stale(state) or _void_stale(state) or _form_batch(state) or _pause_without_signal(state)


def _vest_rest(state: State) -> list[ev.Body]:
    """Once a run has ended and nothing is disputed, what was earned is everyone's for good."""
    if state.pending or state.rechecks:
        return []
    return [ev.Vested(n.key, len(n.escrow), sum(n.escrow)) for n in state.nodes.values() if n.escrow]


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


def _pause_without_signal(state: State) -> list[ev.Body]:
    """After many groups in a row that teach nothing, more of them are not paid for until the host has looked."""
    limit = state.law.max_flat_groups
    if state.phase != "running" or not limit or state.flat < limit:
        return []
    return [ev.RulesChanged(phase="paused", cause="no signal")]


def _form_batch(state: State) -> list[ev.Body]:
    step, law = len(state.batches), state.law
    if step >= law.steps or step > state.version + law.max_staleness:
        return []
    members = _first_by_slot(state, step) if law.max_staleness == 0 else next_members(state)
    if len(members) < law.batch_groups:
        return []
    return [ev.BatchFormed(step, tuple(sorted(members)))]


def next_members(state: State) -> list[tuple[int, int]]:
    """Groups that the next batch would take now, in the order of acceptance, of no worker more than its share."""
    members: list[tuple[int, int]] = []
    taken, most = Counter[str](), groups_a_worker(state.law)
    for place in usable(state):
        maker = state.maker_of(place)
        if taken[maker] < most and len(members) < state.law.batch_groups:
            taken[maker] += 1
            members.append(place)
    return members


def groups_beyond_share(state: State) -> int:
    """Usable groups that the next batch leaves because their workers have filled their share of it."""
    members = next_members(state)
    return len(usable(state)) - len(members) if len(members) < state.law.batch_groups else 0


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

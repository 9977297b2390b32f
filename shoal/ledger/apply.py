"""`apply`: the only function that changes a state, event by event.

Called by the book on each new event and by every replay. It is total over the events of a valid log, knows no clock
and no randomness, and decides nothing: it books what an event says.
"""

from functools import singledispatch
from typing import Any

import msgspec

from shoal.algos.replay import Evidence, Figures, update
from shoal.ledger import events as ev
from shoal.ledger.audits import VALIDATOR_FAULTS, ahead, influence, turn_begins
from shoal.ledger.state import Block, Lease, Node, Slot, State, Submission, Version
from shoal.protocol.types import GroupVerdict


def apply(state: State, entry: ev.Entry) -> State:
    """Book one event, in place."""
    _apply(entry.body, state, entry)
    state.seq, state.head = entry.seq, entry.hash
    return state


@singledispatch
def _apply(body: Any, state: State, entry: ev.Entry) -> None:
    raise AssertionError(f"no rule to apply {type(body).__name__}")


@_apply.register
def _(body: ev.RunCreated, state: State, entry: ev.Entry) -> None:
    state.run, state.name, state.run_key, state.trainer_key = body.run, body.name, body.run_key, body.trainer_key
    state.validators, state.envs, state.sampling, state.rules = body.validators, body.envs, body.sampling, body.rules
    state.chain_end, state.audit_chain_end, state.config = body.chain_end, body.audit_chain_end, body.config


@_apply.register
def _(body: ev.RulesChanged, state: State, entry: ev.Entry) -> None:
    if body.phase:
        state.phase, state.pause_cause = body.phase, body.cause
    if body.phase == "running":
        state.flat, state.flat_reward = 0, 0.0
    if body.admitted_validator:
        state.validators = (*state.validators, body.admitted_validator)
    if body.kicked and body.kicked in state.nodes:
        state.nodes[body.kicked].standing = "kicked"
    if body.steps:
        state.rules = msgspec.structs.replace(state.law, steps=body.steps)
    if body.lease_s:
        state.rules = msgspec.structs.replace(state.law, lease_s=body.lease_s)
    if body.max_flat_groups >= 0:
        state.rules = msgspec.structs.replace(state.law, max_flat_groups=body.max_flat_groups)
    if body.config:
        state.config = body.config


@_apply.register
def _(body: ev.NodeJoined, state: State, entry: ev.Entry) -> None:
    facts = (body.role, body.name, body.implementation, body.dtype, body.device)
    if body.key in state.nodes:
        node = state.nodes[body.key]
        if facts[2:] != (node.implementation, node.dtype, node.device):
            node.valid_blocks = 0  # another engine has to show itself first
        node.role, node.name, node.implementation, node.dtype, node.device = facts
    else:
        state.nodes[body.key] = Node(body.key, *facts)


@_apply.register
def _(body: ev.LeaseGranted, state: State, entry: ev.Entry) -> None:
    state.leases[body.lease] = Lease(body.lease, body.worker, body.version, body.blocks, entry.time, body.deadline)
    state.open_leases.append(body.lease)
    state.nodes[body.worker].leases += 1
    for block in body.blocks:
        held = state.versions[body.version].blocks.setdefault(block, Block("leased", body.lease))
        held.status, held.lease = "leased", body.lease
    _take(state, body.version, body.blocks)


@_apply.register
def _(body: ev.LeaseLapsed, state: State, entry: ev.Entry) -> None:
    lease = state.leases[body.lease]
    lease.status = "stale" if body.cause == "stale" else "lapsed"
    state.open_leases.remove(body.lease)
    if body.cause in ("deadline", "returned", "held"):
        _drop(state, lease, entry.time)
    elif body.cause == "stale":
        state.nodes[lease.worker].stale += 1
    _give_back(state, lease.version, lease.blocks)


def _drop(state: State, lease: Lease, now: float) -> None:
    """Leases that go at the same moment are one drop: a node that stops, or a coordinator that was down."""
    node = state.nodes[lease.worker]
    node.lapsed += 1
    node.dropped += node.dropped == 0 or node.dropped_at != now
    node.dropped_at = now
    for number in lease.blocks:
        block = state.versions[lease.version].blocks[number]
        block.dropped_by, block.dropped_at = node.key, now


@_apply.register
def _(body: ev.SubmissionReceived, state: State, entry: ev.Entry) -> None:
    lease = state.leases[body.lease]
    if lease.status == "open":
        state.open_leases.remove(body.lease)
    lease.status, lease.submission = "submitted", body.digest
    state.nodes[lease.worker].dropped = 0
    for number in lease.blocks:
        block = state.versions[lease.version].blocks[number]
        block.status, block.dropped_by = "submitted", ""
    _take(state, lease.version, lease.blocks)
    state.submissions[body.digest] = Submission(
        body.lease, body.digest, entry.seq, entry.hash, entry.time, body.groups, voted_at=entry.time
    )
    state.pending.append(body.digest)


@_apply.register
def _(body: ev.AuditDrawn, state: State, entry: ev.Entry) -> None:
    submission = state.submissions[body.submission]
    submission.audited, submission.rate, submission.draws = body.slots, body.rate, body.draws
    submission.mean_influence, submission.order = body.mean_influence, body.order


@_apply.register
def _(body: ev.VerdictGiven, state: State, entry: ev.Entry) -> None:
    submission = state.submissions[body.submission]
    node = state.nodes[state.leases[submission.lease].worker]
    node.evidence = {**node.evidence, body.validator: evidence_after(state, body.validator, node, body.groups)}
    _count_missed_turns(state, submission, body.validator, entry.time)
    submission.votes = {**submission.votes, body.validator: body.groups}
    submission.differs += [(body.validator, other) for other in body.differs_from]
    if body.projection:
        submission.projections[body.validator] = body.projection
    submission.voted_at = entry.time
    for verdict in body.groups:
        if verdict.outcome in ("soft", "hard"):
            node.last_reason = f"{verdict.check}: {verdict.detail}"
            if verdict.bound:
                node.last_reason += f" ({verdict.figure:.3g}, allowed are {verdict.bound:.3g})"


def _count_missed_turns(state: State, submission: Submission, voter: str, now: float) -> None:
    """Who stood before the voter let a turn pass; one that began before it was last heard of says nothing new."""
    passed = ahead(submission.order, submission.votes, state.silent(), voter)
    for place, node in enumerate(state.nodes[key] for key in passed):
        if turn_begins(submission.voted_at, place) >= node.heard:
            node.missed, node.heard = node.missed + 1, now
    state.nodes[voter].missed, state.nodes[voter].heard = 0, now


def evidence_after(state: State, validator: str, node: Node, groups: tuple[GroupVerdict, ...]) -> Evidence:
    """A validator's evidence about a worker once the audited groups of its verdict are added."""
    evidence = node.evidence.get(validator, Evidence())
    noise = state.law.bounds.get(f"{state.law.dtype}/{state.nodes[validator].dtype}")
    for group in groups:
        if noise is not None and group.audited and group.outcome == "accept":
            evidence = update(evidence, Figures(group.tokens, group.flipped, group.gap_sum), noise)
    return evidence


@_apply.register
def _(body: ev.Decision, state: State, entry: ev.Entry) -> None:
    submission = state.submissions[body.submission]
    submission.decided = True
    state.pending.remove(body.submission)
    lease = state.leases[submission.lease]
    lease.status = "decided"
    blocks = state.versions[lease.version].blocks
    for block in body.accepted:
        blocks[block].status = "done"
    _give_back(state, lease.version, body.refused)
    node = state.nodes[lease.worker]
    for check, groups in _refused_groups(state, lease, submission, body).items():
        node.refused += groups
        node.reasons[check] = node.reasons.get(check, 0) + groups
        state.refused[check] = state.refused.get(check, 0) + groups
    if set(body.refused) - set(body.disputed):
        node.valid_blocks, node.failures = 0, node.failures + 1
    else:
        node.valid_blocks += len(body.accepted)
        if node.standing == "new" and body.accepted:
            node.standing = "good"
    if body.recheck:
        state.rechecks.append(body.submission)
    else:
        submission.votes = {}


def _refused_groups(state: State, lease: Lease, submission: Submission, body: ev.Decision) -> dict[str, int]:
    """Groups of the refused blocks by the check that refused them, as the first vote tells; disputed ones are no fault."""
    size, refused = state.law.block_groups, dict[int, str]()
    faulty = set(body.refused) - set(body.disputed)
    for groups in submission.votes.values():
        for index, group in enumerate(groups):
            if lease.blocks[index // size] in faulty and group.outcome in ("soft", "hard"):
                refused.setdefault(group.slot, group.check)
    if faulty and not refused:  # no group by itself, but the noise of many
        refused = dict.fromkeys(range(len(faulty) * size), "sampling")
    return {check: list(refused.values()).count(check) for check in refused.values()}


@_apply.register
def _(body: ev.GroupAccepted, state: State, entry: ev.Entry) -> None:
    signal = len(set(body.rewards)) > 1
    state.versions[body.version].slots[body.slot] = Slot(
        "signal" if signal else "flat", body.submission, body.index, body.digest, body.rewards, body.tokens
    )
    state.influence += influence(body.rewards, body.tokens)
    if signal:
        state.pool.append((body.version, body.slot))
        state.flat, state.flat_reward = 0, 0.0
    else:
        state.flat += 1
        state.flat_reward += sum(body.rewards) / max(1, len(body.rewards))
    worker = state.leases[state.submissions[body.submission].lease].worker
    state.nodes[worker].accepted += 1
    state.block_tokens += body.tokens
    state.accepted_groups += 1


@_apply.register
def _(body: ev.SlotVoid, state: State, entry: ev.Entry) -> None:
    version = state.versions[body.version]
    for slot in body.slots:
        version.slots[slot] = Slot("void")
    for place in [place for place in state.free if place[0] == body.version and body.cause == "stale"]:
        state.free.remove(place)
        version.blocks[place[1]].status = "done"


@_apply.register
def _(body: ev.BatchFormed, state: State, entry: ev.Entry) -> None:
    state.batches[body.step] = body.groups
    members = set(body.groups)
    state.pool = [place for place in state.pool if place not in members]
    state.flat, state.flat_reward = 0, 0.0
    for version, number in body.groups:
        slot = state.versions[version].slots[number]
        slot.step = body.step
        state.nodes[state.maker_of((version, number))].influence += influence(slot.rewards, slot.tokens)


@_apply.register
def _(body: ev.CheckpointPublished, state: State, entry: ev.Entry) -> None:
    if body.version in state.versions:  # signed again
        state.versions[body.version].manifest = body.manifest
    else:
        state.versions[body.version] = Version(body.root, body.manifest)


@_apply.register
def _(body: ev.LinkRevealed, state: State, entry: ev.Entry) -> None:
    state.versions[body.version].revealed = True


@_apply.register
def _(body: ev.Credit, state: State, entry: ev.Entry) -> None:
    node = state.nodes[body.node]
    node.credits += body.tokens
    node.escrow.append(body.tokens)
    state.issued += body.tokens


@_apply.register
def _(body: ev.Vested, state: State, entry: ev.Entry) -> None:
    node = state.nodes[body.node]
    node.vested += body.tokens
    del node.escrow[: body.groups]


@_apply.register
def _(body: ev.Forfeited, state: State, entry: ev.Entry) -> None:
    node = state.nodes[body.node]
    node.paid_lapses += body.cause == "lapsed"
    del node.escrow[len(node.escrow) - body.groups :]
    _burn(state, node, body.tokens)


@_apply.register
def _(body: ev.Slash, state: State, entry: ev.Entry) -> None:
    node = state.nodes[body.node]
    node.escrow.clear()
    node.valid_blocks = 0
    _burn(state, node, body.tokens)


def _burn(state: State, node: Node, tokens: int) -> None:
    node.credits -= tokens
    state.burned += tokens


@_apply.register
def _(body: ev.Rechecked, state: State, entry: ev.Entry) -> None:
    state.rechecks.remove(body.submission)
    state.submissions[body.submission].votes = {}


@_apply.register
def _(body: ev.ValidatorFault, state: State, entry: ev.Entry) -> None:
    node = state.nodes[body.validator]
    node.failures += 1
    node.last_reason = body.cause
    if node.failures >= VALIDATOR_FAULTS:
        node.standing = "suspended"


@_apply.register
def _(body: ev.NodeQuarantined, state: State, entry: ev.Entry) -> None:
    node = state.nodes[body.node]
    node.standing, node.until, node.quarantined_for = "quarantined", body.until, body.submission
    node.evidence = {}
    if not node.last_reason.startswith(body.cause):  # else a verdict has told it with its figures
        node.last_reason = body.cause


@_apply.register
def _(body: ev.NodeRestored, state: State, entry: ev.Entry) -> None:
    state.nodes[body.node].standing = "new"


@_apply.register
def _(body: ev.RunEnded, state: State, entry: ev.Entry) -> None:
    state.phase = "ended"


def _give_back(state: State, version: int, blocks: tuple[int, ...]) -> None:
    for block in blocks:
        state.versions[version].blocks[block].status = "free"
        state.free.append((version, block))
    state.free.sort()


def _take(state: State, version: int, blocks: tuple[int, ...]) -> None:
    taken = {(version, block) for block in blocks}
    state.free = [place for place in state.free if place not in taken]

"""The run as a whole: what its host may do, what the clock brings, and what the state alone demands next."""

from collections.abc import Iterator

import msgspec

from shoal.ledger.batches import form_batch
from shoal.ledger.commands import Admin, Reconfigure, Tick
from shoal.ledger.errors import Refused
from shoal.ledger.event import Body
from shoal.ledger.lease_granting import close_stale_leases, expire_leases, void_free, void_unleased_branches
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.members import quarantine_by_host, refuse_replayed, restore_served
from shoal.ledger.pay import vest_all
from shoal.ledger.replay_context import LogPosition, PayContext, Table, Trigger
from shoal.ledger.run_events import NO_SIGNAL, Create, RulesChanged, RunCreated, RunEnded
from shoal.ledger.state import State
from shoal.ledger.verdict_decisions import end_overdue
from shoal.ledger.versions import reveal_rest
from shoal.protocol.constants import ADMIN_ACTIONS
from shoal.protocol.messages import AdminRequest, AlarmEvidence
from shoal.protocol.messages.responses import CreditLine
from shoal.protocol.signing import is_public_key

PHASES = {"pause": "paused", "resume": "running", "drain": "draining"}
"""By action of the host."""


def decide_create(command: Create, state: State) -> list[Body]:
    assert state.seq < 0, "a run is created once"
    return [command.body]


def decide_admin(command: Admin, state: State) -> list[Body]:
    if state.phase == "ended":
        raise Refused("ended", "the run has ended")
    events, created = _of_the_host(command, state), command.created
    refuse_replayed(created, state.host_signed, changes=bool(events))  # guard: old-admin
    if created <= state.host_signed:
        return events
    # One that changes nothing now could change something when it is sent again.
    *before, change = events or [RulesChanged()]  # guard: idle-admin-is-logged
    assert isinstance(change, RulesChanged), "the host's requests end with a change of the rules"
    return [*before, msgspec.structs.replace(change, created=created, evidence=command.request.evidence)]


def _of_the_host(command: Admin, state: State) -> list[Body]:
    action, request, key = command.action, command.request, command.request.node
    if surplus := surplus_of(action, request):  # guard: admin-takes-no-more
        raise Refused("malformed", surplus)
    if action in PHASES:
        cause = f"alarm: {request.evidence.cause}" if action == "pause" and request.evidence else ""
        return [] if state.phase == PHASES[action] else [RulesChanged(phase=PHASES[action], cause=cause)]
    if action == "rate":
        if not request.lr_factor:
            raise Refused(
                "malformed", "rate: say by which factor, from 0.01 to 1, as `shoal admin rate RUN --factor 0.5`"
            )
        changes = request.lr_factor != state.main.lr_factor(len(state.main.batches))
        return [RulesChanged(lr_factor=request.lr_factor)] if changes else []
    if action == "admit":
        keys = list(dict.fromkeys((key, *request.also)))
        for one in keys:
            if not is_public_key(one):
                raise Refused(
                    "malformed", f"{one[:70]!r} is not a public key of 64 hex digits: `shoal validate` prints it"
                )
        return [RulesChanged(admitted_validator=one) for one in keys if one not in state.validators]
    if action == "quarantine":
        member = state.members[_node_named(key, state)]
        if member.role != "worker":
            raise Refused(
                "conflict", f"{member.name} is a {member.role}: only workers are quarantined, kick it instead"
            )
        events = list(quarantine_by_host(state, member, command.now))
        return [*events, RulesChanged(quarantined=member.key)] if events else []
    if action == "kick":
        node = _node_named(key, state)
        if state.members[node].standing == "kicked":
            return []
        held = [LeaseLapsed(lease.id, "kicked") for lease in state.open_leases_of(node)]
        return [*held, RulesChanged(kicked=node)]
    raise Refused("malformed", f"unknown action {action!r}: known are {', '.join(ADMIN_ACTIONS)}")


def surplus_of(action: str, request: AdminRequest) -> str:
    """What a host's request names that its action does not take, as one line; empty if nothing. Such a host means another
    action, and a run that drains for all ends for good."""
    node = request.node
    if node and action not in ("kick", "admit", "quarantine"):
        effect = {"drain": "it ends the run for all", "rate": "it is the run's"}.get(action, "it is for the whole run")
        return f"{action} takes no node, and {node[:70]!r} was given: {effect}; see kick, quarantine"
    if request.also and action != "admit":
        return f"{action} takes one node: type it once for each. Only admit takes several keys"
    if request.lr_factor is not msgspec.UNSET and action != "rate":
        return f"{action} takes no factor (--factor): only rate does"
    return ""


def _node_named(key: str, state: State) -> str:
    """The key of the one node that a name, a key or the start of one means. Raises `Refused`."""
    named = [k for k, member in state.members.items() if key and (k.startswith(key) or member.name == key)]
    # guard: full-key-is-no-name
    matches = [key] if key in state.members else named  # a name that is another's key does not shield it
    if len(matches) != 1:
        raise Refused("unknown", f"{len(matches)} nodes match {key!r}: give a name or the start of one key")
    return matches[0]


def decide_reconfigure(command: Reconfigure, state: State) -> list[Body]:
    if command.config == state.config:
        return []
    return [
        RulesChanged(
            config=command.config, steps=command.steps, lease_s=command.lease_s,
            max_flat_groups=command.max_flat_groups, quarantine_s=command.quarantine_s,
        )
    ]  # fmt: skip


def decide_tick(command: Tick, state: State) -> list[Body]:
    due = [*expire_leases(state, command.now, command.host_hung), *restore_served(state, command.now)]
    # What ends a submission reads the stake that these events change, so it waits for the next tick.
    return due or [*end_overdue(state, command.now, command.envs)] or [*reveal_rest(state, command.links)]


def consequent_events(state: State) -> list[Body]:
    """What the state alone demands next; empty if nothing. `LogWriter` repeats it until it is empty."""
    if state.seq < 0 or state.main.version < 0:
        return []
    if state.phase == "ended":
        return close_stale_leases(state) or vest_all(state)
    if state.main.version >= state.rules.steps or _has_drained(state):
        return [RunEnded(state.main.version)]
    closed = close_stale_leases(state)
    if closed:
        return closed
    for _, stream in sorted(state.streams.items()):
        events = void_free(state, stream) or void_unleased_branches(state, stream) or form_batch(state, stream)
        if events:
            return events
    return _pause_on_faults(state) or _pause_without_signal(state)


def _pause_on_faults(state: State) -> list[Body]:
    """After too many rollouts on which an environment failed, nothing more is leased until the host has looked. The log
    decides it, so it holds after a kill, and anyone who replays the log comes to the same pause."""
    cause = state.faults.cause(state.law) if state.faults and state.phase == "running" else ""
    return [RulesChanged(phase="paused", cause=cause)] if cause else []


def _pause_without_signal(state: State) -> list[Body]:
    """After many groups in a row that teach nothing, no more are paid for until the host has looked."""
    limit = state.rules.max_flat_groups
    # guard: pause-without-signal
    if state.phase != "running" or not limit or all(stream.flat < limit for stream in state.streams.values()):
        return []
    return [RulesChanged(phase="paused", cause=NO_SIGNAL)]


def _has_drained(state: State) -> bool:
    """A draining run ends when nothing is leased or unjudged and the trainer has used every batch that can be formed."""
    stream = state.main
    at_work = state.open_leases or state.pending or stream.version in stream.batches
    more = (
        state.phase == "draining"
        and not at_work
        and (void_unleased_branches(state, stream) or form_batch(state, stream))
    )
    return state.phase == "draining" and not at_work and not more


def cause_of_run_created(body: RunCreated, here: LogPosition) -> Trigger | None:
    return Trigger(None) if here.place == 0 else None


def cause_of_rules_changed(body: RulesChanged, here: LogPosition) -> Trigger:
    return Trigger(None)  # the host's right


def lines_of_rules_changed(body: RulesChanged, told: PayContext) -> Iterator[CreditLine]:
    if body.kicked == told.node:
        yield told.line("the host removed this node")
    if body.quarantined == told.node and body.evidence:
        yield told.line(f"the host gave as its reason {in_words(body.evidence)}")


def what_was_done(change: RulesChanged) -> str:
    """A host's request for which an alarm was the reason, as one line."""
    if change.quarantined:
        done = f"quarantined {change.quarantined[:12]}"
    elif change.lr_factor:
        done = f"multiplies the learning rate by {change.lr_factor:.3g}"
    else:
        done = f"made the run {change.phase}" if change.phase else "asked for nothing new"
    return f"the host {done} because of {in_words(change.evidence)}" if change.evidence else f"the host {done}"


def in_words(evidence: AlarmEvidence) -> str:
    """An alarm's evidence as one line."""
    figures = ", ".join(f"{fact.name} {fact.value:.3g} (limit {fact.limit:.3g})" for fact in evidence.measured)
    return f"the alarm {evidence.cause}, raised at step {evidence.since}: {figures or 'no figures'}"


COMMANDS: Table = {Create: decide_create, Admin: decide_admin, Reconfigure: decide_reconfigure, Tick: decide_tick}
CAUSES: Table = {RunCreated: cause_of_run_created, RulesChanged: cause_of_rules_changed}
LINES: Table = {RulesChanged: lines_of_rules_changed}

"""The run itself: created, changed by its host, ended. Events, commands, and how a state takes them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.ledger.constants import Law
from shoal.ledger.event import Entry
from shoal.ledger.state import State
from shoal.protocol.messages import AlarmEvidence, EnvSpec, LrFactor, Message, Rules, Sampling
from shoal.protocol.task_draws import DifficultyRule, TaskList

NO_SIGNAL = "no signal"
"""Why a run pauses itself."""


class RunCreated(Message, frozen=True, omit_defaults=True):
    """The first event: everything that the run's nodes must agree on."""

    run: str
    name: str
    run_key: str
    trainer_key: str
    validators: tuple[str, ...]
    chain_end: str
    """End of the chain of slot secrets, hex."""
    audit_chain_end: str
    """End of the second chain, from which audits are drawn."""
    envs: tuple[EnvSpec, ...]
    sampling: Sampling
    rules: Rules
    config: dict[str, Any]
    """The resolved run file."""
    law: Law
    """Constants and version of the rules."""
    difficulty: DifficultyRule | None = None
    """How draws follow solve rates. Only in logs of runs whose draws do."""
    root_key: str = ""
    """The key that names publishers. Empty: the run key."""
    task_lists: dict[str, TaskList] = {}
    """By label: the tasks that are drawn from, for environments whose run file names a list."""


class RulesChanged(Message, frozen=True):
    """The host changed the phase, admitted or removed a node, or resumed with a changed run file; or the run paused."""

    phase: str = ""
    admitted_validator: str = ""
    kicked: str = ""
    steps: int = 0
    config: dict[str, Any] = {}
    lease_s: float = 0.0
    cause: str = ""
    """Why the run paused itself: "no signal", or "environment faults: ..."; or "alarm: CAUSE" if an alarm paused it."""
    max_flat_groups: int = -1
    """-1 changes nothing."""
    quarantine_s: float = -1.0
    """-1 changes nothing."""
    created: int = 0
    """When the host signed the request that led to it, seconds since the epoch; 0 if none did."""
    quarantined: str | msgspec.UnsetType = msgspec.UNSET
    """The worker that the host quarantined; the event before says until when."""
    lr_factor: LrFactor | msgspec.UnsetType = msgspec.UNSET
    """What the learning rate is multiplied by, in the steps whose batches come after this event."""
    evidence: AlarmEvidence | msgspec.UnsetType = msgspec.UNSET
    """The alarm that led to the host's request, if one did."""


class RunEnded(Message, frozen=True):
    version: int


@dataclass(frozen=True)
class Create:
    """Begin a log."""

    body: RunCreated
    now: float


def apply_run_created(body: RunCreated, state: State, entry: Entry) -> None:
    state.run, state.name, state.run_key, state.trainer_key = body.run, body.name, body.run_key, body.trainer_key
    state.validators, state.envs, state.sampling = body.validators, body.envs, body.sampling
    state.chain_end, state.audit_chain_end, state.config = body.chain_end, body.audit_chain_end, body.config
    state.rules = body.rules
    state.law = body.law
    state.difficulty = body.difficulty
    state.root_key = body.root_key or msgspec.UNSET
    state.task_lists = body.task_lists or msgspec.UNSET
    state.host_validators = body.validators or msgspec.UNSET


def apply_rules_changed(body: RulesChanged, state: State, entry: Entry) -> None:
    state.host_signed = body.created or state.host_signed
    if body.phase:
        state.phase, state.pause_cause = body.phase, body.cause
    if body.phase == "running":  # guard: resume-counts-anew
        for stream in state.streams.values():
            stream.forget_flat()
        if state.faults:
            state.faults.reset()
    if body.admitted_validator:
        state.validators = (*state.validators, body.admitted_validator)
    if body.kicked and body.kicked in state.members:
        member = state.members[body.kicked]
        member.standing = "kicked"
        state.forget(member.until, "quarantine", member.key)  # guard: kicked-is-not-due
    if body.lr_factor is not msgspec.UNSET:
        state.main.lower_rate(body.lr_factor)
    rules = state.rules
    flat = rules.max_flat_groups if body.max_flat_groups < 0 else body.max_flat_groups
    quarantine_s = rules.quarantine_s if body.quarantine_s < 0 else body.quarantine_s
    steps, lease_s = body.steps or rules.steps, body.lease_s or rules.lease_s
    state.rules = msgspec.structs.replace(
        rules, steps=steps, lease_s=lease_s, max_flat_groups=flat, quarantine_s=quarantine_s
    )
    state.config = body.config or state.config


def apply_run_ended(body: RunEnded, state: State, entry: Entry) -> None:
    state.phase = "ended"


EVENTS = {
    "run_created": (RunCreated, apply_run_created),
    "rules_changed": (RulesChanged, apply_rules_changed),
    "run_ended": (RunEnded, apply_run_ended),
}

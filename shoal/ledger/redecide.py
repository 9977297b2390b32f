"""Every decision of a log made again: from each event that something outside caused, the rules must give what follows.

Called by `verify`. Pure: it reads entries, runs `decide` and `follow` on a state of its own, and compares. So a credit
that no verdict gave, a batch with other members, an audit that was not drawn, or a penalty that was left out is found
though every hash fits. It knows no bodies: whether a verdict is true is for `shoal audit`.

What the rules take from outside and the log does not hold cannot be made again: a worker's measured speed (any lease
from one block up to the most that the rules allow passes), and draws whose link is not revealed yet.
"""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

from shoal.ledger import events as ev
from shoal.ledger.apply import apply
from shoal.ledger.commands import (
    Admin,
    AskLease,
    Command,
    Enter,
    Judge,
    Publish,
    Refused,
    ReturnLeases,
    Submit,
    Tick,
    Wait,
)
from shoal.ledger.decide import decide, follow
from shoal.ledger.seeds import audit_draws, recheck_draw, turns
from shoal.ledger.state import State
from shoal.protocol.constants import MAX_OPEN_LEASES
from shoal.protocol.types import Join, Verdict

FASTEST_TOKENS_PER_S = 1e15
"""Stands for a speed that is not known: the rules then give the largest lease that they allow."""


FAULTS = (KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError, AssertionError)
"""What rules and state raise over events that no run of these rules ever wrote."""


class Cause(NamedTuple):
    """What led to some events: a command for the rules, or None where the host alone decides or a draw is secret."""

    command: Command | None
    length: int = 1
    """Events that come with it, if there is no command."""


class Here(NamedTuple):
    """A place in a log: the state before it, and what may be looked at to tell the cause of its event."""

    state: State
    entries: Sequence[ev.Entry]
    place: int
    links: Mapping[int, ev.LinkRevealed]

    @property
    def now(self) -> float:
        """The time inside the command."""
        return self.entries[self.place].time


def redecide(entries: Sequence[ev.Entry], links: Mapping[int, ev.LinkRevealed]) -> list[str]:
    """A sentence for each event that the rules do not lead to. `links` are the revealed ones, by version.

    The entries must follow each other by hash and be such that `apply` takes them: `verify` sees to both.
    """
    state, findings = State(), list[str]()
    expected: list[ev.Body] = []
    untold = 0
    """Events still to come of which nothing can be said."""
    for place, entry in enumerate(entries):
        if not expected and not untold:
            expected, untold = _due(Here(state, entries, place, links), findings)
        if untold:
            untold -= 1
        elif expected:
            due = expected.pop(0)
            if not _fits(entry.body, due):
                findings.append(f"{_name(entry)} is not what the rules give here: {_difference(entry.body, due)}")
                expected = []
        apply(state, entry)
        if not expected and not untold:
            expected = follow(state)
    if expected or untold:
        due_next = ev.kind_of(expected[0]) if expected else "audit_drawn"
        findings.append(f"the log ends in the middle of what its last event led to: due is {due_next}")
    return findings


def _due(here: Here, findings: list[str]) -> tuple[list[ev.Body], int]:
    """Events that the rules give here, this one first; and how many come of which nothing can be said."""
    entry = here.entries[here.place]
    try:
        cause = _cause(entry.body, here)
        if cause is None:
            findings.append(f"{_name(entry)} follows from nothing before it")
            return [], 0
        if cause.command is None:
            return [], cause.length
        events = decide(cause.command, here.state)
    except (Refused, Wait) as refusal:
        findings.append(f"{_name(entry)} is against the rules: {refusal}")
    except FAULTS as fault:
        findings.append(f"{_name(entry)} is nothing that the rules know how to take ({type(fault).__name__})")
    else:
        if not events:
            findings.append(f"{_name(entry)} changes nothing: the rules give no event here")
        return events, 0
    return [], 0


def _name(entry: ev.Entry) -> str:
    return f"event {entry.seq} ({ev.kind_of(entry.body)})"


@singledispatch
def _cause(body: Any, here: Here) -> Cause | None:
    """The command behind an event that is the first of its kind; None for events that only ever follow from others."""
    return None


@_cause.register
def _(body: ev.RunCreated, here: Here) -> Cause | None:
    return Cause(None) if here.place == 0 else None


@_cause.register
def _(body: ev.RulesChanged, here: Here) -> Cause | None:
    return Cause(None)  # the host's right


@_cause.register
def _(body: ev.NodeJoined, here: Here) -> Cause | None:
    join = Join(body.role, body.name, 0.0, body.implementation, body.dtype, body.device)  # type: ignore[arg-type]
    return Cause(Enter(body.key, join, here.now))


@_cause.register
def _(body: ev.LeaseGranted, here: Here) -> Cause | None:
    holding = tuple(lease.id for lease in here.state.open_leases_of(body.worker))
    return Cause(AskLease(body.worker, holding, FASTEST_TOKENS_PER_S, here.now))


@_cause.register
def _(body: ev.LeaseLapsed, here: Here) -> Cause | None:
    worker = here.state.leases[body.lease].worker
    if body.cause == "deadline":
        return Cause(Tick(here.now))
    if body.cause == "kicked":
        return Cause(Admin("kick", worker, here.now))
    return Cause(ReturnLeases(worker, _returned(here, worker), here.now)) if body.cause == "returned" else None


def _returned(here: Here, worker: str) -> tuple[str, ...]:
    """Leases that a worker gave back in one request."""
    leases = []
    for entry in here.entries[here.place : here.place + MAX_OPEN_LEASES]:
        lapsed = entry.body
        if not isinstance(lapsed, ev.LeaseLapsed) or lapsed.cause != "returned":
            break
        if here.state.leases[lapsed.lease].worker == worker:
            leases.append(lapsed.lease)
    return tuple(leases)


@_cause.register(ev.NodeRestored | ev.Rechecked | ev.Decision)
def _(body: ev.Body, here: Here) -> Cause | None:
    return Cause(Tick(here.now))  # where no verdict brought it, its time had come


@_cause.register
def _(body: ev.SubmissionReceived, here: Here) -> Cause | None:
    lease = here.state.leases[body.lease]
    if lease.version not in here.links:
        return Cause(None, length=2)  # with its audits
    link = bytes.fromhex(here.links[lease.version].audit_link)
    return Cause(
        Submit(
            body.worker,
            body.lease,
            body.digest,
            body.size_bytes,
            body.groups,
            audit_draws(body.digest, len(body.groups), link),
            turns(body.digest, here.state.validators, link),
            here.now,
        )
    )


@_cause.register
def _(body: ev.VerdictGiven, here: Here) -> Cause | None:
    verdict = Verdict(body.submission, body.groups)
    return Cause(
        Judge(body.validator, verdict, here.now, body.projection, _recheck(here, body.submission), body.differs_from)
    )


def _recheck(here: Here, submission: str) -> float:
    """The draw for a second look; while its link is secret, what the decision says that it was."""
    version = here.state.leases[here.state.submissions[submission].lease].version
    if version in here.links:
        return recheck_draw(submission, bytes.fromhex(here.links[version].audit_link))
    for entry in here.entries[here.place + 1 :]:
        if isinstance(entry.body, ev.VerdictGiven):
            break
        if isinstance(entry.body, ev.Decision) and entry.body.submission == submission:
            return 0.0 if entry.body.recheck else 1.0
    return 1.0


@_cause.register
def _(body: ev.LinkRevealed, here: Here) -> Cause | None:
    hidden = [v for v, version in here.state.versions.items() if not version.revealed]
    return Cause(Tick(here.now, {v: (f.link, f.audit_link) for v, f in here.links.items() if v in hidden}))


@_cause.register
def _(body: ev.CheckpointPublished, here: Here) -> Cause | None:
    known = {v: (found.link, found.audit_link) for v, found in here.links.items() if v <= body.version}
    return Cause(Publish(here.state.trainer_key, body.version, body.root, body.manifest, known, here.now))


@singledispatch
def _fits(body: Any, due: ev.Body) -> bool:
    """Whether an event is the one that is due."""
    return bool(body == due)


@_fits.register
def _(body: ev.LeaseGranted, due: ev.Body) -> bool:
    """A slower worker gets fewer of the same blocks, and less time."""
    if not isinstance(due, ev.LeaseGranted) or not body.blocks or body.deadline > due.deadline + 1e-6:
        return False
    granted = (body.lease, body.worker, body.version, body.blocks)
    return granted == (due.lease, due.worker, due.version, due.blocks[: len(body.blocks)])


def _difference(body: ev.Body, due: ev.Body) -> str:
    """What differs, in a few words."""
    if type(body) is not type(due):
        return f"due is {ev.kind_of(due)}"
    fields = [name for name in body.__struct_fields__ if getattr(body, name) != getattr(due, name)]
    said = ", ".join(f"{name} is {_short(getattr(body, name))}, not {_short(getattr(due, name))}" for name in fields)
    return said or "it differs"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."

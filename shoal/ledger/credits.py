"""A node's pay explained: a line for each event of the log that touched it, with the verdict behind it.

Called by `shoal credits`, which replays the whole log, and by the coordinator, a page at a time. Pure, and it decides
nothing: it retells events. A new kind of event that touches pay registers its lines here.
"""

from collections.abc import Iterable, Iterator
from functools import singledispatch
from typing import Any, NamedTuple

from shoal.ledger import events as ev
from shoal.ledger.state import Lease, State
from shoal.protocol.accounts import CreditLine
from shoal.protocol.types import GroupVerdict

Verdicts = dict[tuple[str, int], list[tuple[str, GroupVerdict]]]
"""By submission and slot: each validator's."""


class Place(NamedTuple):
    """What a line is told from."""

    entry: ev.Entry
    state: State
    """At this event or after it: leases and slots stay in it."""
    node: str
    verdicts: Verdicts
    """Those of the node's submissions that were met on the way."""

    def line(self, detail: str, credits: int = 0, **facts: Any) -> CreditLine:
        """A line about this event."""
        kind = ev.kind_of(self.entry.body)
        return CreditLine(self.entry.seq, self.entry.time, kind, credits, detail, **facts)


def explain(entries: Iterable[ev.Entry], state: State, node: str) -> Iterator[CreditLine]:
    """Lines of the node with this key, in the order of the log. `state` is that of the last entry, or a later one.

    Verdicts are told from the entries alone: begin early enough to meet them.
    """
    verdicts: Verdicts = {}
    for entry in entries:
        body = entry.body
        if isinstance(body, ev.VerdictGiven) and _lease(state, body.submission).worker == node:
            for group in body.groups:
                verdicts.setdefault((body.submission, group.slot), []).append((body.validator, group))
        yield from _lines(body, Place(entry, state, node, verdicts))


def _lease(state: State, submission: str) -> Lease:
    return state.leases[state.submissions[submission].lease]


@singledispatch
def _lines(body: Any, at: Place) -> Iterator[CreditLine]:
    """Most events touch nobody's pay."""
    yield from ()


@_lines.register
def _(body: ev.Credit, at: Place) -> Iterator[CreditLine]:
    if body.node != at.node:
        return
    slot = at.state.versions[body.version].slots.get(body.slot)
    submission = slot.submission if slot else ""
    given = at.verdicts.get((submission, body.slot), [])
    yield at.line(
        "accepted",
        body.tokens,
        version=body.version,
        slot=body.slot,
        submission=submission,
        validators=tuple(validator for validator, _ in given),
        audited=any(group.audited for _, group in given),
    )


@_lines.register
def _(body: ev.VerdictGiven, at: Place) -> Iterator[CreditLine]:
    lease = _lease(at.state, body.submission)
    if lease.worker != at.node:
        return
    for group in body.groups:
        if group.outcome in ("soft", "hard"):
            yield at.line(
                f"found wanting ({group.outcome}): {group.detail}",
                version=lease.version,
                slot=group.slot,
                submission=body.submission,
                validators=(body.validator,),
                audited=group.audited,
                check=group.check,
                figure=group.figure,
                bound=group.bound,
            )


@_lines.register
def _(body: ev.Decision, at: Place) -> Iterator[CreditLine]:
    """Groups that would have passed, had not another of their block been refused, or another validator refused."""
    lease, size = _lease(at.state, body.submission), at.state.law.block_groups
    if lease.worker != at.node:
        return
    for block in body.refused:
        for slot in range(block * size, (block + 1) * size):
            given = at.verdicts.get((body.submission, slot), [])
            if given and all(group.outcome == "accept" for _, group in given):
                yield at.line(
                    f"not paid: {'validators differ on' if block in body.disputed else 'refused whole is'} block {block}",
                    version=lease.version,
                    slot=slot,
                    submission=body.submission,
                    validators=tuple(validator for validator, _ in given),
                    audited=any(group.audited for _, group in given),
                )


@_lines.register
def _(body: ev.LeaseLapsed, at: Place) -> Iterator[CreditLine]:
    lease = at.state.leases[body.lease]
    if lease.worker == at.node:
        blocks = ", ".join(map(str, lease.blocks))
        ended = _LEASE_ENDS.get(body.cause, f"lapsed: {body.cause}")
        yield at.line(f"lease {lease.id} (blocks {blocks}) {ended}", version=lease.version)


_LEASE_ENDS = {
    "stale": "was closed without cost: its version is too old",
    "held": "lapsed: its version is too old, and this happens to this node clearly more often than to the run",
}


@_lines.register
def _(body: ev.Vested, at: Place) -> Iterator[CreditLine]:
    if body.node == at.node:
        yield at.line(f"vested: {body.tokens} tokens of the {body.groups} oldest groups are safe from a slash")


@_lines.register
def _(body: ev.Forfeited, at: Place) -> Iterator[CreditLine]:
    if body.node == at.node:
        yield at.line(f"forfeited for lease {body.lease}, {body.cause}: {body.groups} groups", -body.tokens)


@_lines.register
def _(body: ev.Slash, at: Place) -> Iterator[CreditLine]:
    if body.node == at.node:
        yield at.line("slashed: two validators found a forgery", -body.tokens, submission=body.submission)


@_lines.register
def _(body: ev.NodeQuarantined, at: Place) -> Iterator[CreditLine]:
    if body.node == at.node:
        yield at.line(f"no leases for {body.until - at.entry.time:.0f} s: {body.cause}")


@_lines.register
def _(body: ev.RulesChanged, at: Place) -> Iterator[CreditLine]:
    if body.kicked == at.node:
        yield at.line("the host removed this node")

"""Pay: credits, their vesting, and what refused work and dropped leases cost."""

from collections import Counter
from collections.abc import Iterator, Sequence

from shoal.ledger.event import Body, Entry
from shoal.ledger.replay_context import PayContext, Table
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, NodeRecord
from shoal.protocol.audit_and_pay import pay_of
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.messages import GroupVerdict, Message
from shoal.protocol.messages.responses import CreditLine

# --- Pay in policy tokens: credits given, vested, forfeited and slashed, after verdicts and lapses ---


class Credit(Message, frozen=True):
    """Pay for one accepted group."""

    node: str
    version: int
    slot: int
    tokens: int
    stream: str = MAIN_STREAM


class Vested(Message, frozen=True):
    """A node's oldest pay, which a slash can no longer take."""

    node: str
    groups: int
    tokens: int


class Forfeited(Message, frozen=True):
    """Pay lost for a refused submission, or for a lapse beyond the free share: the newest groups that have not vested.

    A worker that has too little of it for a lapse owes the rest, and loses it of the next pay. It never owes more than one
    lease.
    """

    node: str
    lease: str
    groups: int
    tokens: int
    cause: str
    """What happened to the lease: refused or lapsed; or owed: its pay settles an earlier lapse."""


class Slash(Message, frozen=True):
    """Two validators found a forgery: the node loses all of its pay that has not vested."""

    node: str
    submission: str
    tokens: int


def stake_entries(state: State, tokens: int) -> list[int]:
    """What pay adds to the pay that a refusal or a lapse takes. Continuations that were not due bring nothing, so they take
    the place of none."""
    return [tokens] if tokens else []  # guard: no-pay-is-no-stake


def apply_credit(body: Credit, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.credits += body.tokens
    member.stake += stake_entries(state, body.tokens)
    state.issued += body.tokens


def apply_vested(body: Vested, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.vested += body.tokens
    del member.stake[: body.groups]


def apply_forfeited(body: Forfeited, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.paid_lapses += body.cause == "lapsed"
    if body.cause == "owed":
        member.owes -= body.groups
    elif body.cause == "lapsed":
        size = len(state.leases[body.lease].blocks) * state.rules.block_groups
        member.owes = max(member.owes, size - body.groups)  # guard: lapse-is-owed
    del member.stake[len(member.stake) - body.groups :]
    remove_credits(state, member, body.tokens)


def apply_slash(body: Slash, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.stake.clear()
    member.valid_blocks = 0  # guard: slash-ends-trust
    remove_credits(state, member, body.tokens)


def remove_credits(state: State, member: NodeRecord, tokens: int) -> None:
    """Take credits out of circulation."""
    member.credits -= tokens
    state.burned += tokens


EVENTS = {
    "credit": (Credit, apply_credit),
    "vested": (Vested, apply_vested),
    "forfeited": (Forfeited, apply_forfeited),
    "slash": (Slash, apply_slash),
}


# --- What is paid for a group, when pay vests, and what a refusal or a lapse costs ---


def vest(state: State, member: NodeRecord, stake: Sequence[int]) -> Iterator[Body]:
    """Pay older than the vesting window is the worker's for good. `stake` includes what is paid in the same moment."""
    # guard: no-vesting-during-recheck
    if any(state.lease_of(state.submissions[name]).worker == member.key for name in state.rechecks):
        return  # a slash may follow, for pay that is older than the window
    due = len(stake) - state.law.vesting_blocks * state.rules.block_groups  # guard: vesting-window
    if due > 0:
        yield Vested(member.key, due, sum(stake[:due]))


def vest_all(state: State) -> list[Body]:
    """Once a run has ended and nothing is open, all pay vests."""
    if state.pending or state.rechecks:
        return []
    return [Vested(m.key, len(m.stake), sum(m.stake)) for m in state.members.values() if m.stake]


def refusal_costs(
    state: State, member: NodeRecord, lease: LeaseRecord, stake: Sequence[int], blocks: int
) -> Iterator[Body]:
    """Each refused block of a submission that is not slashed costs the newest pay that has not vested."""
    each = state.law.refused_blocks * state.rules.block_groups  # guard: refusal-costs-no-more
    groups = min(len(stake), blocks * each)  # guard: each-refused-block-costs
    if groups:
        yield Forfeited(member.key, lease.id, groups, sum(stake[-groups:]), "refused")


def recheck_rate(state: State, member: NodeRecord, groups: Sequence[GroupVerdict]) -> float:
    """Share of submissions like this one that are judged again: enough that a forgery which a friend among the validators
    accepts gains nothing on average, because a recheck takes its pay and the worker's stake."""
    pay, stake = sum(pay_of(group, state.rules) for group in groups), sum(member.stake)
    least = state.law.recheck_rate
    return max(least, pay / (pay + stake)) if pay else least  # guard: risk-is-rechecked


def lapse_costs(state: State, late: Sequence[LeaseRecord]) -> Iterator[Body]:
    """Each lapse beyond the free share costs a lease's worth of the newest pay that has not vested.

    The worker owes what is missing: the event says how much it could lose.
    """
    unpaid, kept = Counter[str](), {lease.worker: list(state.members[lease.worker].stake) for lease in late}
    for lease in late:
        member, stake = state.members[lease.worker], kept[lease.worker]
        unpaid[member.key] += 1
        groups = min(len(stake), len(lease.blocks) * state.rules.block_groups)
        lapses = member.lapsed - member.paid_lapses + unpaid[member.key]
        if lapses > 1 + state.law.free_lapses * member.leases:  # guard: free-lapses
            unpaid[member.key] -= 1
            lost = stake[len(stake) - groups :]
            yield Forfeited(member.key, lease.id, groups, sum(lost), "lapsed")
            del stake[len(stake) - groups :]


def debt_costs(member: NodeRecord, lease: LeaseRecord, stake: Sequence[int]) -> list[Forfeited]:
    """New pay first settles what an earlier lapse cost. `stake` includes the new pay."""
    groups = min(member.owes, len(stake))
    return [Forfeited(member.key, lease.id, groups, sum(stake[-groups:]), "owed")] if groups else []


def lines_of_credit(body: Credit, told: PayContext) -> Iterator[CreditLine]:
    if body.node != told.node:
        return
    slot = told.state.streams[body.stream].versions[body.version].slots.get(body.slot)
    submission = slot.submission if slot else ""
    given = told.verdicts.get((submission, body.slot), [])
    yield told.line(
        "accepted",
        body.tokens,
        version=body.version,
        slot=body.slot,
        submission=submission,
        validators=tuple(validator for validator, _ in given),
        audited=any(group.audited for _, group in given),
    )


def lines_of_vested(body: Vested, told: PayContext) -> Iterator[CreditLine]:
    if body.node == told.node:
        yield told.line(f"vested: {body.tokens} tokens of the {body.groups} oldest groups are safe from a slash")


def lines_of_forfeited(body: Forfeited, told: PayContext) -> Iterator[CreditLine]:
    if body.node == told.node:
        what = f"forfeited for lease {body.lease}, {body.cause}: {body.groups} groups"
        if body.cause == "owed":
            what = f"forfeited for an earlier lapse, when there was too little to lose: {body.groups} groups"
        yield told.line(what, -body.tokens)


def lines_of_slash(body: Slash, told: PayContext) -> Iterator[CreditLine]:
    if body.node == told.node:
        yield told.line("slashed: two validators found a forgery", -body.tokens, submission=body.submission)


LINES: Table = {
    Credit: lines_of_credit, Vested: lines_of_vested, Forfeited: lines_of_forfeited, Slash: lines_of_slash,
}  # fmt: skip

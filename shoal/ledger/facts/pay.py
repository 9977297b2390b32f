"""Pay in policy tokens: credits given, vested, forfeited and slashed.

No command asks for pay; verdicts and lapses lead to it.
"""

from shoal.ledger.entry import Entry
from shoal.ledger.state import State
from shoal.ledger.state_records import Member
from shoal.protocol.constants import MAIN_STREAM
from shoal.protocol.types import Message


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


def staked(state: State, tokens: int) -> list[int]:
    """What pay adds to the pay that a refusal or a lapse takes. Continuations that were not due bring nothing, so they take
    the place of none."""
    return [tokens] if tokens else []  # guard: no-pay-is-no-stake


def apply_credit(body: Credit, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.credits += body.tokens
    member.stake += staked(state, body.tokens)
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
    burn(state, member, body.tokens)


def apply_slash(body: Slash, state: State, entry: Entry) -> None:
    member = state.members[body.node]
    member.stake.clear()
    member.valid_blocks = 0  # guard: slash-ends-trust
    burn(state, member, body.tokens)


def burn(state: State, member: Member, tokens: int) -> None:
    """Take credits out of circulation."""
    member.credits -= tokens
    state.burned += tokens


EVENTS = {
    "credit": (Credit, apply_credit),
    "vested": (Vested, apply_vested),
    "forfeited": (Forfeited, apply_forfeited),
    "slash": (Slash, apply_slash),
}

"""A node's pay line by line, and its signed balance."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from shoal.ledger.event import Entry
from shoal.ledger.event_types import apply, lines_of
from shoal.ledger.replay_context import PayContext, Verdicts
from shoal.ledger.state import State
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol.encoding import to_json
from shoal.protocol.messages.responses import CreditLine, CreditPage, Statement
from shoal.protocol.signing import Key, verify_signature

# --- A node's pay explained ---
#
# The lines of each kind of event are in `LINES` of its subject's file.


def explain(entries: Iterable[Entry], state: State, node: str) -> Iterator[CreditLine]:
    """Lines of the node with this key, in the order of the log. `state` is that of the last entry, or a later one.

    Verdicts are told from the entries alone: begin early enough to meet them.
    """
    verdicts: Verdicts = {}
    for entry in entries:
        body = entry.body
        if isinstance(body, VerdictGiven) and state.lease_of(state.submissions[body.submission]).worker == node:
            for group in body.groups:
                verdicts.setdefault((body.submission, group.slot), []).append((body.validator, group))
        yield from lines_of(body, PayContext(entry, state, node, verdicts))


MAX_CREDIT_LINES = 500
"""Most lines on one page that explains a node's pay, but for those of its last event."""


def credit_page(entries: Sequence[Entry], state: State, node: str, after: int) -> CreditPage:
    """What changed a member's pay in these entries after event `after`, at most about MAX_CREDIT_LINES lines."""
    end, lines = max([after, *(entry.seq for entry in entries[-1:])]), list[CreditLine]()
    for line in explain(entries, state, node):
        if line.seq <= after:
            continue
        if len(lines) >= MAX_CREDIT_LINES and line.seq > lines[-1].seq:
            end = lines[-1].seq
            break
        lines.append(line)
    member = state.members[node]
    return CreditPage(node, member.leases, member.lapsed, tuple(lines), end, end < state.seq)


# --- A balance that its owner can show to anybody ---
#
# The signature shows that the run's host said so; that it is what the log gives is shown by replaying the log up to the
# event that the statement names.


PURPOSE = "statement"
"""What the signature is for: no receipt or manifest passes for one."""


def sign_statement(state: State, node: str, key: Key, now: float) -> Statement:
    """The balance of a member of the run at the head of its log."""
    member = state.members[node]
    unsigned = Statement(
        run=state.run, run_key=key.public, node=node, name=member.name, credits=member.credits, seq=state.seq,
        head=state.head, time=now, signature="",
    )  # fmt: skip
    return msgspec.structs.replace(unsigned, signature=key.sign(PURPOSE, to_json(unsigned)))


def is_signed(statement: Statement) -> bool:
    """Whether the key that the statement names signed it. Whose key that is, the run's first event says."""
    unsigned = to_json(msgspec.structs.replace(statement, signature=""))
    return verify_signature(statement.run_key, PURPOSE, unsigned, statement.signature)


def disagreements(statement: Statement, entries: Sequence[Entry]) -> list[str]:
    """Where a signed statement is not what a log gives, a sentence each. The log must have been verified."""
    if not 0 <= statement.seq < len(entries):
        return [f"the log ends at event {len(entries) - 1}, before event {statement.seq}, which the statement names"]
    state = State()
    for entry in entries[: statement.seq + 1]:
        apply(state, entry)
    if (state.run, state.run_key) != (statement.run, statement.run_key):
        return [f"the log is of run {state.run[:12]} with key {state.run_key[:12]}, the statement of "
                f"{statement.run[:12]} with {statement.run_key[:12]}"]  # fmt: skip
    if state.head != statement.head:
        return [f"fork: the run key signed head {statement.head[:12]} at event {statement.seq}, where this log has "
                f"{state.head[:12]}"]  # fmt: skip
    node = state.members.get(statement.node)
    gives = node.credits if node else 0
    if gives != statement.credits:
        return [f"the statement says {statement.credits} tokens, the log gives {gives} at event {statement.seq}"]
    return []

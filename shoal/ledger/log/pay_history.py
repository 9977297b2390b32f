"""A node's pay line by line, and its signed balance."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from shoal.ledger.event import Entry
from shoal.ledger.registry import apply, lines_of
from shoal.ledger.replay_context import PayContext, Verdicts
from shoal.ledger.state import State
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol.encoding import to_json
from shoal.protocol.messages.responses import CreditLine, Statement
from shoal.protocol.signing import Key, verify_signature

# --- A node's pay explained ---
#
# A line for each event of the log that touched it, with the verdict behind it.
#
# The lines of each kind of event are in `LINES` of its subject's file in `rules/`.


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


# --- A balance that its owner can show to anybody ---
#
# Signed by the run key, and checked without asking the run.
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

"""A member's pay: a page of the events that changed it, and its balance as a signed statement.

Called by `api` for anyone who asks. It reads the log and decides nothing; `ledger/log/credits` explains an event.
"""

from shoal.ledger.log.credits import explain
from shoal.ledger.log.statement import sign_statement
from shoal.ledger.table import read_entry
from shoal.protocol.accounts import CreditLine, CreditPage, Statement
from shoal.protocol.constants import MAX_EVENTS
from shoal.roles.coordinator.desk import Desk

MAX_CREDIT_LINES = 500
"""Most lines on one page that explains a node's pay."""
LOOK_BACK_EVENTS = 200
"""Events read before a page, to find the verdicts behind its first lines."""


def credit_page(desk: Desk, key: str, after: int) -> CreditPage:
    """What changed a member's pay after event `after`: about `MAX_CREDIT_LINES` lines from at most `MAX_EVENTS` events."""
    after = max(-1, after)
    first = max(-1, after - LOOK_BACK_EVENTS)
    rows = desk.book.store.read(first, after - first + MAX_EVENTS)
    entries = [read_entry(data)[0] for data, _ in rows]
    end = max(after, entries[-1].seq) if entries else after
    lines: list[CreditLine] = []
    for line in explain(entries, desk.state, key):
        if line.seq <= after:
            continue
        if len(lines) >= MAX_CREDIT_LINES and line.seq > lines[-1].seq:
            end = lines[-1].seq
            break
        lines.append(line)
    node = desk.state.members[key]
    return CreditPage(key, node.leases, node.lapsed, tuple(lines), end, end < desk.state.seq)


def statement(desk: Desk, key: str) -> Statement:
    """A member's balance, signed by the run."""
    return sign_statement(desk.state, key, desk.key, desk.clock())

"""A node's pay explained: a line for each event of the log that touched it, with the verdict behind it.

Called by `shoal credits`, which replays the whole log, and by the coordinator, a page at a time. Pure, and it decides
nothing: it retells events. The lines of each kind of event are in `LINES` of its
subject's file in `rules/`.
"""

from collections.abc import Iterable, Iterator

from shoal.ledger.entry import Entry
from shoal.ledger.facts.verdicts import VerdictGiven
from shoal.ledger.past import Told, Verdicts
from shoal.ledger.state import State
from shoal.ledger.table import lines_of
from shoal.protocol.accounts import CreditLine


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
        yield from lines_of(body, Told(entry, state, node, verdicts))

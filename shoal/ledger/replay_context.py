"""A place in a log, as the rules look at it again: to say what caused an event, or what it meant for a node's pay.

Each file of a subject has a `cause_of_x` for the events that something outside the log caused, and `lines_of_x` for those
that touch pay. `log/check` and `log/pay_history` walk the log and call them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.ledger.event import Entry
from shoal.ledger.state import State
from shoal.protocol.messages import GroupVerdict
from shoal.protocol.messages.responses import CreditLine

Table = dict[type, Callable[..., Any]]
"""A function for each type of command or event. `ledger/event_types.py` merges those of all subjects."""


class Trigger(NamedTuple):
    """What led to an event."""

    command: object | None
    """For the rules; None if the host alone decides."""


class LogPosition(NamedTuple):
    """An event's place in a log, with the state before it."""

    state: State
    entries: Sequence[Entry]
    place: int
    links: Mapping[int, tuple[str, str]]
    """The revealed links of the whole log, by version: of slots, and of audits."""

    @property
    def now(self) -> float:
        """The time inside the command."""
        return self.entries[self.place].time


Verdicts = dict[tuple[str, int], list[tuple[str, GroupVerdict]]]
"""Each validator's, by submission and slot."""


class PayContext(NamedTuple):
    """What the lines about one event are told from."""

    entry: Entry
    state: State
    """At this event or later: leases and slots stay in it."""
    node: str
    """Key whose pay is told."""
    verdicts: Verdicts
    """On the node's submissions, as far as they were met on the way."""

    def line(self, detail: str, credits: int = 0, **facts: Any) -> CreditLine:
        """A line about this event."""
        return CreditLine(self.entry.seq, self.entry.time, self.entry.kind, credits, detail, **facts)

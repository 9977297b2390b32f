"""The subjects of the ledger, the types of their events, and the function for each event and command.

A subject is a file, or two where one would be long. It has up to four tables: `EVENTS`, each with its type and how a state
takes it; `COMMANDS`, each with the rule that decides it; `CAUSES`, what led to an event; `LINES`, what an event says about
a node's pay. A new subject is a file that `SUBJECTS` lists. A new event needs

- the subject's file: the class, `apply_x`, `EVENTS`; `CAUSES` if a request or the clock causes it, `LINES` if it is of pay;
- its sentence in `runs/event_text.py`, when it is written in docs/reference/protocol.md, its name in
  `tests/golden/test_golden.py`, a test in `tests/ledger`, and after a release `RULES_VERSION`.

What leads to it may need more:

- a command of a node: `commands.py` and `COMMANDS`; its message in `protocol/messages`, and `CALLS` in
  `roles/coordinator/routes.py`;
- an action of the host: `ADMIN_ACTIONS` in `protocol/constants.py`, its case in `run_decisions._of_the_host`, whose last
  event is a `RulesChanged`, and its help in `cli/host.py`;
- an argument of such an action: a field of `AdminRequest` in `protocol/messages/responses.py`, refused for other actions in
  `run_decisions.surplus_of`, and its option in `cli/host.py`.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from shoal.ledger import (
    batches,
    draw_table_changes,
    lease_granting,
    leases,
    members,
    pay,
    run_decisions,
    run_events,
    submissions,
    verdict_decisions,
    verdicts,
    versions,
)
from shoal.ledger.event import Body, Entry, RawEvent, encode, read_stored
from shoal.ledger.replay_context import LogPosition, PayContext, Trigger
from shoal.ledger.state import State
from shoal.protocol.encoding import WireError, from_json
from shoal.protocol.messages.responses import CreditLine

SUBJECTS: tuple[ModuleType, ...] = (
    members, pay, leases, lease_granting, batches, submissions, verdicts, verdict_decisions, draw_table_changes, versions,
    run_events, run_decisions,
)  # fmt: skip


def _table(name: str) -> dict[Any, Any]:
    return {key: value for subject in SUBJECTS for key, value in getattr(subject, name, {}).items()}


_EVENTS: dict[str, tuple[type[Body], Callable[[Any, State, Entry], None]]] = _table("EVENTS")
_KINDS = {event: kind for kind, (event, _) in _EVENTS.items()}
_COMMANDS: dict[type, Callable[[Any, State], list[Body]]] = _table("COMMANDS")
_CAUSES: dict[type[Body], Callable[[Any, LogPosition], Trigger | None]] = _table("CAUSES")
_LINES: dict[type[Body], Callable[[Any, PayContext], Iterator[CreditLine]]] = _table("LINES")

KINDS = {kind: event for kind, (event, _) in _EVENTS.items()}
"""Type of each kind of event."""


def make_entry(seq: int, time: float, body: Body, prev: str) -> Entry:
    """An event that follows the one with hash `prev`.

    Raises `WireError` for one that could not be read again: once stored, no replay would get past it.
    """
    entry, _ = read_entry(encode(seq, time, _KINDS[type(body)], body, prev))  # guard: unreadable-is-not-stored
    return entry


def read_entry(data: bytes) -> tuple[Entry, str]:
    """Decode stored bytes; returns the entry and the `prev` that it claims. Raises `WireError` if they are not an event."""
    stored = read_stored(data)
    return typed(stored), stored.prev


def typed(stored: RawEvent) -> Entry:
    """An event with its body in its own type. Raises `WireError` for a kind or a body that this code does not know."""
    if stored.kind not in KINDS:
        raise WireError(f"event {stored.seq}: unknown kind {stored.kind!r}; a newer shoal wrote this log")
    body = from_json(bytes(stored.body), KINDS[stored.kind])
    return Entry(stored.seq, stored.time, stored.kind, body, stored.data, stored.hash)


def kind_of(body: Body) -> str:
    """The name of an event's kind, as stored."""
    return _KINDS[type(body)]


def apply(state: State, entry: Entry) -> State:
    """Book one event, in place. Total over the events of a valid log; it uses no clock and decides nothing."""
    _, apply_x = _EVENTS[entry.kind]
    apply_x(entry.body, state, entry)
    state.seq, state.head, state.time = entry.seq, entry.hash, entry.time
    return state


def decide(command: object, state: State) -> list[Body]:
    """Events that a command leads to. Raises `Refused` or `Wait`, in which case nothing happened."""
    return _COMMANDS[type(command)](command, state)


def cause_of(body: Body, here: LogPosition) -> Trigger | None:
    """The command behind an event; None for events that only ever follow from others."""
    find = _CAUSES.get(type(body))
    return find(body, here) if find else None


def lines_of(body: Body, told: PayContext) -> Iterator[CreditLine]:
    """What an event says about a node's pay; most say nothing."""
    tell = _LINES.get(type(body))
    if tell:
        yield from tell(body, told)

"""An event's bytes and its hash: the ground floor of the log.

It does not depend on kinds of events: `ledger/event_types.py` gives bodies their types.
"""

import msgspec

from shoal.protocol.encoding import domain_hash, from_json, to_json
from shoal.protocol.messages import Event, Message

GENESIS = "0" * 64
"""`prev` of the first event."""

Body = Message
"""What an event says."""


class RawEvent(msgspec.Struct, frozen=True):
    """One event as stored, its body still raw."""

    seq: int
    time: float
    kind: str
    body: msgspec.Raw
    prev: str
    """Hash of the event before it."""
    data: bytes
    """The bytes that are stored and hashed."""
    hash: str


class Entry(msgspec.Struct, frozen=True):
    """One event with its body in its own type."""

    seq: int
    time: float
    kind: str
    body: Body
    data: bytes
    hash: str


def encode(seq: int, time: float, kind: str, body: Body, prev: str) -> bytes:
    """The bytes of an event that follows the one with hash `prev`."""
    return to_json(Event(seq, time, kind, msgspec.Raw(to_json(body)), prev))


def read_stored(data: bytes) -> RawEvent:
    """Decode stored bytes. Raises `WireError` if they are not an event."""
    event = from_json(data, Event)
    return RawEvent(event.seq, event.time, event.kind, event.body, event.prev, data, event_hash(data))


def event_hash(data: bytes) -> str:
    """Hash of an event's stored bytes, hex: the `prev` of the next event, and the log's head."""
    return domain_hash("event", data).hex()

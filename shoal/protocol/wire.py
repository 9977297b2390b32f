"""Canonical encoding of what crosses the wire: strict in, one form out, hashes over the bytes.

Called by every room that sends, stores or hashes a message. It knows no message type: those are in `types`.
Small things are JSON, bulk is msgpack. A message that does not decode into exactly the asked type is refused,
and nothing is ever signed or hashed after being encoded a second time: the bytes that arrived are what counts.
"""

import hashlib
import re
from typing import TypeVar

import msgspec

from shoal.protocol.constants import DOMAIN, MAX_JSON_DEPTH

T = TypeVar("T")

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""A JSON string, or one that never ends; it is looked at once, whatever it holds."""

_BRACKET = re.compile(rb"[][{}]")

_json_encoder = msgspec.json.Encoder(order="deterministic")
_msgpack_encoder = msgspec.msgpack.Encoder(order="deterministic")


class WireError(ValueError):
    """Bytes from elsewhere are not what they should be; the message says which field and why."""


def digest(data: bytes) -> str:
    """SHA-256 of stored bytes, in hex: the name under which a blob is kept."""
    return hashlib.sha256(data).hexdigest()


def domain_hash(purpose: str, *parts: bytes) -> bytes:
    """SHA-256 over the protocol's domain, a purpose and parts, each with its length so that no two lists collide."""
    h = hashlib.sha256(DOMAIN + purpose.encode() + b"\0")
    for part in parts:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return h.digest()


def to_json(value: object) -> bytes:
    """Encode a small message: keys of mappings sorted, fields in the order of the type, no spaces."""
    return _json_encoder.encode(value)


def from_json(data: bytes, kind: type[T]) -> T:
    """Decode a small message into exactly `kind`.

    Raises `WireError` for anything else: other types, deep nesting, NaN, numbers that do not fit.
    """
    _refuse_deep_nesting(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a valid {_name(kind)}: {error}") from None


def to_msgpack(value: object) -> bytes:
    """Encode a bulk message."""
    return _msgpack_encoder.encode(value)


def from_msgpack(data: bytes | memoryview, kind: type[T]) -> T:
    """Decode a bulk message into exactly `kind`; raises `WireError` for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a valid {_name(kind)}: {error}") from None


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))


def _refuse_deep_nesting(data: bytes) -> None:
    """Depth is counted outside of strings: a stranger's name may hold any bracket, and is read again from the log."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):  # guard: brackets-in-strings
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:  # guard: json-depth
            raise WireError(f"nested deeper than {MAX_JSON_DEPTH} levels (MAX_JSON_DEPTH)")

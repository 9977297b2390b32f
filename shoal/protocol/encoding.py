"""Encoding of messages: canonical JSON, digests and Merkle roots. Bytes from strangers are parsed strictly."""

import functools
import hashlib
import operator
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from shoal.protocol.constants import DOMAIN, MAX_JSON_DEPTH

# --- canonical encoding of messages, and one way to add ---
#
# Small messages are JSON, bulk is msgpack. A message that does not decode into exactly the given type is refused. Hashes
# and signatures are over the bytes that arrived, never over a second encoding of them.


T = TypeVar("T")

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""A JSON string, complete or without an end. The pattern reads each byte once, whatever the string holds."""

_BRACKET = re.compile(rb"[][{}]")

_json_encoder = msgspec.json.Encoder(order="deterministic")
_msgpack_encoder = msgspec.msgpack.Encoder(order="deterministic")


class WireError(ValueError):
    """Bytes from elsewhere are not the message that they should be. The text says which field is wrong, and why."""


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of stored bytes, in hex: the name under which a blob is kept."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Whether a text has 64 lower-case hex digits, as SHA-256, keys and seeds have. Such a text is safe as a file name."""
    return bool(_HEX_64.fullmatch(text))


_HEX_64 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def domain_hash(purpose: str, *parts: bytes) -> bytes:
    """SHA-256 over the protocol's domain, a purpose and parts. Each part follows its length, so no two lists collide."""
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
    """Count depth outside of strings: a stranger's name may hold brackets, and a log with it must stay readable."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):  # guard: brackets-in-strings
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:  # guard: json-depth
            raise WireError(f"nested deeper than {MAX_JSON_DEPTH} levels (MAX_JSON_DEPTH)")


def float_sum(values: Iterable[float]) -> float:
    """The sum of floats, rounded after each addition from the left. The built-in `sum` does so until Python 3.11; later
    ones correct the rounding, so that nodes with different Pythons would compute different influences and draws."""
    return functools.reduce(operator.add, values, 0.0)


# --- one hash for an ordered list: the Merkle tree of RFC 6962, with our domain ---
#
# Leaves and inner nodes are hashed for different purposes, so an inner node cannot be presented as a leaf (second
# preimage). A last node without a partner moves up as it is, so a list that repeats its end has another root.


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root of the tree over the leaves in their order, 32 bytes; an empty list has a root of its own."""
    if not leaves:
        return domain_hash("merkle/empty")
    level = [domain_hash("merkle/leaf", leaf) for leaf in leaves]
    while len(level) > 1:
        pairs = [domain_hash("merkle/node", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]

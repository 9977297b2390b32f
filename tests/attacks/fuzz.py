"""Mutations of submissions: bytes, msgpack, fields and proofs, each drawn from a `random.Random` and nothing else.

Called by the fuzzers of the verifier and of the coordinator. It knows neither; it starts from honest bodies and gives
back bytes. Two mutations of one submission may undo each other, and some change nothing that is read.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.protocol.encoding import from_msgpack, to_msgpack
from shoal.protocol.messages import Group, Rollout, Submission


@dataclass(frozen=True)
class Specimens:
    """What mutations start from: an honest body, and honest bodies of other leases or policies to splice it with."""

    honest: bytes
    others: tuple[bytes, ...]


def mutated(kind: str, rng: Random, specimens: Specimens) -> bytes:
    """One mutated body; `kind` is one of `KINDS`."""
    return KINDS[kind](rng, specimens)


# --- bytes ---


def _flip(rng: Random, specimens: Specimens) -> bytes:
    """Up to 8 bits or bytes changed, close together or anywhere."""
    body = bytearray(specimens.honest)
    start, reach = rng.randrange(len(body)), rng.choice([1, 16, len(body)])
    for _ in range(rng.randint(1, 8)):
        at = (start + rng.randrange(reach)) % len(body)
        body[at] ^= rng.choice([1 << rng.randrange(8), rng.randint(1, 255)])
    return bytes(body)


def _cut(rng: Random, specimens: Specimens) -> bytes:
    """The beginning, the end or a middle of a body."""
    body = specimens.honest
    first, last = sorted((rng.randrange(len(body) + 1), rng.randrange(len(body) + 1)))
    return rng.choice([body[:first], body[last:], body[first:last], body[:-1], body[1:]])


def _splice(rng: Random, specimens: Specimens) -> bytes:
    """The head of one honest body and the tail of another, or the same of two groups, where a field begins."""
    head, tail = specimens.honest, rng.choice(specimens.others)
    if rng.random() < 0.5:
        submission, other = from_msgpack(head, Submission), from_msgpack(tail, Submission)
        groups, at = list(submission.groups), rng.randrange(len(submission.groups))
        mark = rng.choice([b"\xa9token_ids", b"\xa6author", b"\xa8logprobs", b"\xa8rollouts", b"\xa6ending"])
        theirs = other.groups[at if rng.random() < 0.7 else rng.randrange(len(groups))]
        groups[at] = groups[at][: groups[at].index(mark)] + theirs[theirs.index(mark) :]
        return to_msgpack(msgspec.structs.replace(submission, groups=tuple(groups)))
    if rng.random() < 0.5:
        head, tail = tail, head
    at = rng.randrange(min(len(head), len(tail)))
    return head[:at] + tail[at if rng.random() < 0.5 else rng.randrange(len(tail)) :]


def _repeat(rng: Random, specimens: Specimens) -> bytes:
    """A slice repeated, in its place or elsewhere; or foreign bytes inserted."""
    body = specimens.honest
    first = rng.randrange(len(body))
    piece = body[first : first + rng.randint(1, 64)] * rng.choice([1, 1, 2, 100])
    if rng.random() < 0.3:
        piece = rng.randbytes(rng.randint(1, 32))
    at = rng.choice([first, rng.randrange(len(body) + 1), len(body)])
    return body[:at] + piece + body[at:]


def _remove(rng: Random, specimens: Specimens) -> bytes:
    """A slice left out, or zeroed."""
    body = specimens.honest
    first, length = rng.randrange(len(body)), rng.randint(1, 64)
    return body[:first] + (bytes(length) if rng.random() < 0.3 else b"") + body[first + length :]


def _noise(rng: Random, specimens: Specimens) -> bytes:
    """Random bytes, up to twice as long as an honest body."""
    return rng.randbytes(rng.randrange(2 * len(specimens.honest)))


# --- msgpack ---


class Raw(NamedTuple):
    """Bytes that replace a value and need not be one."""

    data: bytes


class Lie(NamedTuple):
    """A container under a 32-bit header that says another count than it holds."""

    value: Any
    count: int


def pack(value: Any) -> bytes:
    """Msgpack of a tree that may hold `Raw` and `Lie`. A mapping is a dict or, to hold a key twice, `Pairs`."""
    match value:
        case Raw():
            return value.data
        case Lie():
            return _header(value.value, value.count) + _contents(value.value)
        case dict() | list():
            return _header(value, len(value)) + _contents(value)
        case _:
            return to_msgpack(value)


class Pairs(list[tuple[Any, Any]]):
    """A mapping as its pairs."""


def _header(value: Any, count: int) -> bytes:
    kind = 0xDF if isinstance(value, (dict, Pairs)) else 0xDD if isinstance(value, list) else 0xC6
    return struct.pack(">BI", 0xDB if isinstance(value, str) else kind, count)


def _contents(value: Any) -> bytes:
    match value:
        case bytes():
            return value
        case str():
            return value.encode()
        case dict() | Pairs():
            pairs = value.items() if isinstance(value, dict) else value
            return b"".join(pack(key) + pack(item) for key, item in pairs)
        case _:
            return b"".join(pack(item) for item in value)


def _tree(rng: Random, specimens: Specimens) -> bytes:
    """One or two values anywhere in the body, its groups included, replaced by odd ones."""
    tree = msgspec.msgpack.decode(specimens.honest)
    tree["groups"] = [msgspec.msgpack.decode(group) for group in tree["groups"]]
    places = list(_places(tree))
    for _ in range(rng.choice([1, 1, 2])):
        container, key = rng.choice(places)
        if key in container if isinstance(container, dict) else key < len(container):
            container[key] = _odd(rng, container[key])
    if isinstance(tree["groups"], list):
        tree["groups"] = [pack(group) if isinstance(group, (dict, Lie, Raw)) else group for group in tree["groups"]]
    body = pack(tree)
    return pack(_odd(rng, tree)) if rng.random() < 0.03 else body


def _places(value: Any) -> "list[tuple[Any, Any]]":
    """Every (container, key) below a value."""
    items: Sequence[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [place for key, item in items for place in [(value, key), *_places(item)]]


ODD: tuple[Any, ...] = (
    0, 1, 2, 3, -1, 127, 128, 2**31, 2**32, 2**63, 2**64 - 1, -(2**31), -(2**63),
    0.0, 0.5, 3.0, -0.0, 1e308, float("nan"), float("inf"), float("-inf"),
    "", "0", "wordle", "stop", "error", "é\0\n", "/" * 200, "w" * 5_000, b"", b"\0", b"\0" * 4_000, None, True, False,
    [], {}, [[]], {"": None}, [None] * 50,
    Raw(b""), Raw(b"\xc1"), Raw(b"\xa3\xff\xfe\xfd"), Raw(b"\xd9\x05\xed\xa0\x80ab"), Raw(b"\xd6\xff\0\0\0\0"),
    Raw(b"\xc7\x0c\xff" + b"\xff" * 12), Raw(b"\xc9\xff\xff\xff\xff\x01"), Raw(b"\xdd\xff\xff\xff\xff"),
    Raw(b"\xdf\xff\xff\xff\xff"), Raw(b"\xdb\xff\xff\xff\xff"), Raw(b"\xc6\xff\xff\xff\xff"), Raw(b"\xc0\xc0"),
    Raw(b"\x91" * 900 + b"\xc0"), Raw(b"\x91" * 5_000), Raw(b"\x81\xa0" * 2_000 + b"\xc0"),
    Raw(b"\xdb\x00\x08\x00\x00" + b"w" * (1 << 19)),
)  # fmt: skip
"""Values of every type and of none: edges of integers and floats, long strings, deep nesting, headers without end."""


def _odd(rng: Random, old: Any) -> Any:
    """Something in the place of a value: a value of `ODD`, a lie about its length, or a small change of it."""
    choice = rng.random()
    if choice < 0.5:
        return rng.choice(ODD)
    if isinstance(old, (dict, list, bytes, str)) and choice < 0.65:
        return Lie(old, rng.choice([0, len(old) - 1, len(old), len(old) + 1, 2**16, 2**31, 2**32 - 1]) % 2**32)
    match old:
        case bool() | None:
            return not old
        case int():
            return old + rng.choice([-1, 1, 256])
        case bytes() | str():
            return old[: rng.randrange(len(old) + 1)] + rng.choice([old[:0], old, old[:1]])
        case list():
            return rng.choice([old[1:], old[:-1], old + old[:1], old[::-1], old * 2, [old]])
        case dict():
            return _odd_mapping(rng, old)
        case _:
            return rng.choice(ODD)


def _odd_mapping(rng: Random, old: dict[Any, Any]) -> Any:
    pairs = list(old.items())
    at = rng.randrange(len(pairs))
    key, item = pairs[at]
    return rng.choice(
        [
            Pairs(pairs[:at] + pairs[at + 1 :]),
            Pairs(pairs[::-1]),
            Pairs([*pairs, (key, rng.choice(ODD))]),
            Pairs([(key, rng.choice(ODD)), *pairs]),
            Pairs([*pairs[:at], (rng.choice([f"{key} ", "", 7, None, key.upper()]), item), *pairs[at + 1 :]]),
            Pairs([*pairs, ("reward", 1.0)]),
            [item for _, item in pairs],
            pack(old),
        ]
    )


# --- fields: what decodes, and reaches the checks behind the decoder ---


def _fields(rng: Random, specimens: Specimens) -> bytes:
    """Fields of one to three rollouts replaced by others of their type."""
    submission, groups = _open(specimens.honest)
    places = [(at, index) for at, group in enumerate(groups) for index in range(len(group.rollouts))]
    for at, index in rng.sample(places, rng.choice([1, 1, 2, 3])):
        rollouts = list(groups[at].rollouts)
        rollouts[index] = _lying_rollout(rng, rollouts[index])
        groups[at] = msgspec.structs.replace(groups[at], rollouts=tuple(rollouts))
    return _close(submission, groups)


def _lying_rollout(rng: Random, rollout: Rollout) -> Rollout:
    change = msgspec.structs.replace
    lies = ["tokens", "tokens", "author", "logprobs", "logprobs", "version", "ending", "all", "length", "starts"]
    match rng.choice(lies):
        case "tokens":
            return change(rollout, token_ids=_edited(rng, rollout.token_ids, "<i4", range(-1, 66)))
        case "author":
            return change(rollout, author=_edited(rng, rollout.author, "u1", (0, 1, 1, 2, 255)))
        case "logprobs":
            values = (0.0, -1.0, -1e-3, 5e-3, 0.02, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))
            return change(rollout, logprobs=_edited(rng, rollout.logprobs, "<f4", values))
        case "version":
            return change(rollout, version=rng.choice([-1, 0, 2, 3, 4, 2**63, -(2**63)]))
        case "ending":
            return change(rollout, ending=rng.choice(["environment", "length", "error", "stop"]))
        case "starts":  # rows that begin where the environment speaks, or anywhere
            spoken = [*np.flatnonzero(rollout.author_T() == 0).tolist(), -1, 0, len(rollout.author), 2**63]
            return change(rollout, starts=tuple(sorted(rng.sample(spoken, rng.randint(1, min(3, len(spoken)))))))
        case "length":  # no whole number of values
            name = rng.choice(["token_ids", "author", "logprobs"])
            data = getattr(rollout, name)
            edited = rng.choice([data[: -rng.randint(1, 3)], data + rng.randbytes(rng.randint(1, 7)), b"", data * 2])
            return change(rollout, **{name: edited})
        case _:  # longer or shorter in all arrays at once, so that their sizes agree
            return _resized(rng, rollout)


def _resized(rng: Random, rollout: Rollout) -> Rollout:
    """Tokens of either author appended, taken off the end or turned around, with authors and log-probs to fit."""
    tokens, authors = rollout.tokens_T().tolist(), rollout.author_T().tolist()
    logprobs_T = np.full(len(authors), -1.0)
    logprobs_T[rollout.author_T() == 1] = rollout.logprobs_P()
    keep = rng.choice([len(tokens), rng.randrange(len(tokens) + 1)])
    more = rng.choice([0, 1, rng.randrange(40), 300])
    by = [rng.choice([0, 1]) for _ in range(more)]
    tokens = tokens[:keep] + [rng.randrange(64) for _ in by]
    authors = authors[:keep] + by
    logprobs = [x for x, author in zip([*logprobs_T[:keep], *([-1.0] * more)], authors, strict=True) if author == 1]
    return msgspec.structs.replace(
        rollout, token_ids=_pack("<i4", tokens), author=_pack("u1", authors), logprobs=_pack("<f4", logprobs)
    )


def _edited(rng: Random, data: bytes, dtype: str, values: Sequence[float]) -> bytes:
    """An array with an item replaced, nudged, put in, taken out, exchanged with its neighbour, or shifted."""
    items = np.frombuffer(data, dtype).tolist()
    at, value = rng.randrange(len(items)), rng.choice(values)
    match rng.choice(["replace", "replace", "replace", "nudge", "insert", "remove", "exchange", "shift", "fill"]):
        case "replace":
            items[at] = value
        case "nudge":
            items[at] = items[at] * (1 + 1e-3 * rng.random()) if dtype == "<f4" else (items[at] ^ 1)
        case "insert":
            items.insert(at, value)
        case "remove":
            del items[at]
        case "exchange":
            items[at - 1], items[at] = items[at], items[at - 1]
        case "shift":
            items = items[at:] + items[:at]
        case _:
            items = [value] * len(items)
    return _pack(dtype, items)


def _pack(dtype: str, items: Sequence[float]) -> bytes:
    return np.array(items, dtype=dtype).tobytes()


def _counts(rng: Random, specimens: Specimens) -> bytes:
    """Groups, rollouts and proofs: more, fewer, exchanged, repeated, or those of another honest body."""
    submission, groups = _open(specimens.honest)
    other, theirs = _open(rng.choice(specimens.others))
    proofs = list(submission.proofs)
    at, to = rng.randrange(len(groups)), rng.randrange(len(groups))
    match rng.choice(["groups", "rollouts", "proofs", "one", "rename"]):
        case "groups":
            groups = _other_order(rng, groups, theirs)
        case "rollouts":
            pool = [rollout for group in (*groups, *theirs) for rollout in group.rollouts]
            rollouts = _other_order(rng, list(groups[at].rollouts), pool)
            groups[at] = msgspec.structs.replace(groups[at], rollouts=tuple(rollouts))
        case "proofs":
            proofs = _other_order(rng, proofs, [*other.proofs, b"", rng.randbytes(66)])
        case "one":  # the rollouts of another slot, under the name of this one
            groups[at] = msgspec.structs.replace(groups[at], rollouts=rng.choice([*groups, *theirs]).rollouts)
        case _:
            names = {
                "slot": groups[to].slot,
                "task": groups[to].task + 1,
                "env": rng.choice(["wordle", "arithmetic", ""]),
            }
            name = rng.choice(sorted(names))
            groups[at] = msgspec.structs.replace(groups[at], **{name: names[name]})
    return _close(msgspec.structs.replace(submission, proofs=tuple(proofs)), groups)


def _other_order(rng: Random, items: list[Any], pool: Sequence[Any]) -> list[Any]:
    edits = [
        items[:-1],
        items[1:],
        [],
        [*items, rng.choice(pool)],
        items[::-1],
        items * 2,
        items * 50,
        items[:1] * len(items),
    ]
    if items:
        at = rng.randrange(len(items))
        edits.append([*items[:at], rng.choice(pool), *items[at + 1 :]])
    return rng.choice(edits)


def _proofs(rng: Random, specimens: Specimens) -> bytes:
    """The bytes of one proof, under groups that are honest. Where the body has none, one is put in."""
    submission, groups = _open(specimens.honest)
    proofs = list(submission.proofs) or [rng.randbytes(66)]
    at = rng.randrange(len(proofs))
    proof = bytearray(proofs[at])
    word = 2 * rng.randrange(len(proof) // 2)
    match rng.choice(["flip", "word", "modulus", "constant", "cut", "grow", "fill", "other", "shift"]):
        case "flip":
            proof[rng.randrange(len(proof))] ^= 1 << rng.randrange(8)
        case "word":
            proof[word : word + 2] = rng.choice([0, 1, 65496, 65497, 65535, rng.randrange(65536)]).to_bytes(2, "big")
        case "modulus":
            proof[:2] = rng.choice([0, 1, 2, 2**15, 65496, 65498, 65535]).to_bytes(2, "big")
        case "constant":
            moved = int.from_bytes(proof[2:4], "big") + rng.choice([-64, -8, -1, 1, 8, 64])
            proof[2:4] = (moved % 65536).to_bytes(2, "big")
        case "cut":
            del proof[rng.randrange(len(proof)) :]
        case "grow":
            proof += rng.choice([b"\0", bytes(proof), rng.randbytes(rng.randrange(300))])
        case "fill":
            proof[2:] = rng.choice([b"\0\0", b"\xff\xff", b"\x3f\x80", b"\x7f\xc0"]) * (len(proof) // 2 - 1)
        case "other":
            proof = bytearray(proofs[at - 1])
        case _:
            proof[2:] = proof[4:] + proof[2:4]
    proofs[at] = bytes(proof)
    return _close(msgspec.structs.replace(submission, proofs=tuple(proofs)), groups)


def _around(rng: Random, specimens: Specimens) -> bytes:
    """The fields around the groups: names, version, engine."""
    submission, groups = _open(specimens.honest)
    engine = {"implementation": "x" * rng.randrange(9), "device": "mps", "dtype": rng.choice(["bfloat16", "int8", ""])}
    name = rng.choice(sorted(engine))
    changes = {
        "run": rng.choice(["", "run-2", submission.run.upper(), submission.run + "\0"]),
        "lease": rng.choice(["", "lease-2", submission.lease + " ", "7" * 99]),
        "version": submission.version + rng.choice([-1, 1, 2**40]),
        "engine": msgspec.structs.replace(submission.engine, **{name: engine[name]}),
    }
    name = rng.choice([*sorted(changes), "engine"])
    return _close(msgspec.structs.replace(submission, **{name: changes[name]}), groups)


def _open(body: bytes) -> tuple[Submission, list[Group]]:
    submission = from_msgpack(body, Submission)
    return submission, [from_msgpack(group, Group) for group in submission.groups]


def _close(submission: Submission, groups: Sequence[Group]) -> bytes:
    return to_msgpack(msgspec.structs.replace(submission, groups=tuple(to_msgpack(group) for group in groups)))


KINDS: dict[str, Callable[[Random, Specimens], bytes]] = {
    "flip": _flip,
    "cut": _cut,
    "splice": _splice,
    "repeat": _repeat,
    "remove": _remove,
    "noise": _noise,
    "tree": _tree,
    "fields": _fields,
    "counts": _counts,
    "proofs": _proofs,
    "around": _around,
}

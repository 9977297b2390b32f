"""What a contained renderer and its child say to each other, as MessagePack, and how token ids are packed.

Used by both ends in `contained`. It knows no process and no pipe.
"""

import array
from collections.abc import Iterator, Sequence

import msgspec

from shoal.policy.history import Part

BATCH_TOKENS = 1 << 14
"""Tokens of the turns that are decoded by one request. A longer turn is a request of its own."""


class Facts(msgspec.Struct, frozen=True):
    eos_id: int
    stop_ids: list[int]
    vocabulary: int
    notation: str
    digest: str
    """Of the files that were opened."""


class Opened(msgspec.Struct):
    facts: Facts | None = None
    refused: str = ""


class Answer(msgspec.Struct, omit_defaults=True):
    ids: bytes = b""
    yes: bool = False
    """What was asked, or whether the prompt leaves the policy's reasoning open."""
    places: list[tuple[int, int, Part]] = []
    """Of a history: for each segment its number of ids, its turn and its part."""
    texts: list[str] = []
    refused: str = ""
    """Why the renderer refuses this text, as it would in our own process."""


def batches(turns: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Turns in their order, as many in one batch as have `BATCH_TOKENS` together. An empty turn counts as one token."""
    batch: list[Sequence[int]] = []
    room = BATCH_TOKENS
    for turn in turns:
        if batch and len(turn) + 1 > room:
            yield batch
            batch, room = [], BATCH_TOKENS
        batch.append(turn)
        room -= len(turn) + 1
    if batch:
        yield batch


def packed(token_ids: Sequence[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    ids = array.array("I")
    ids.frombytes(data[: len(data) // ids.itemsize * ids.itemsize])
    return ids.tolist()

"""The MessagePack messages between a contained renderer and its child, and how token ids are packed.

It handles neither processes nor pipes.
"""

import array
from collections.abc import Iterator, Sequence

import msgspec

from shoal.chat.history import Part

BATCH_TOKENS = 1 << 14
"""Most tokens that one request decodes, unless a single turn is longer."""


class RendererFacts(msgspec.Struct, frozen=True):
    eos_id: int
    stop_ids: list[int]
    vocabulary: int
    notation: str
    digest: str
    """Digest of the files that were opened."""


class RendererOpened(msgspec.Struct):
    facts: RendererFacts | None = None
    refused: str = ""


class RendererAnswer(msgspec.Struct, omit_defaults=True):
    ids: bytes = b""
    yes: bool = False
    """The answer to a question, or whether the prompt leaves the policy's reasoning open."""
    places: list[tuple[int, int, Part]] = []
    """For each segment of a history: its number of ids, its turn and its part."""
    texts: list[str] = []
    refused: str = ""
    """Why the renderer refuses this text. It would do the same in our process."""


def batches(turns: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Turns in order, in batches of at most `BATCH_TOKENS` tokens, or of one longer turn. Each turn counts one more."""
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

"""Turns: what a worker and the host tell each other while the host plays the environment, and what the host records of it.

Workers send turns and read the answers. The coordinator passes them on to the host's stage, and keeps one record for each
submission. Validators and auditors compare submissions with it. Texts travel as token ids, little-endian int32 in bytes.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import UNSET, UnsetType

from shoal.protocol.encoding import domain_hash
from shoal.protocol.field_types import Message
from shoal.protocol.field_types import Said as Why
from shoal.protocol.messages.rollouts import POLICY, Block, Ending, Group, Rollout

Outcome = Literal["", "environment", "length", "error", "void"]
"""How a rollout ended, in the words of `Ending`; empty while it goes on, and void if its slot cannot be filled."""


class EnvTurn(Message, frozen=True):
    """`POST /v1/leases/{id}/turns`, msgpack: what the policy wrote in one turn of a block.

    A lease takes each turn once. The same turn again, with the same tokens, gets the same answer.
    """

    block: int
    turn: int
    """0 asks for the openings. Turn n says what the policy wrote after answer n - 1."""
    written: tuple[bytes, ...] = ()
    """Token ids, one entry for each rollout that was open after the last answer, in its order; empty in turn 0."""


class EnvReply(Message, frozen=True, array_like=True):
    """The environment's answer to one rollout."""

    text: int
    """Index into the answer's texts: the token ids to append to the row that the next turn continues."""
    room: int
    """Tokens that the policy may write next, its stop token included; 0 if the rollout has ended."""
    ending: Outcome
    author: int = POLICY
    """Author of the turn that is answered, as the rollout must name it."""
    row: int = 0
    """Index of the row that the next turn continues. One more than the rows so far opens another with the text."""


class TurnAnswer(Message, frozen=True):
    """What the environment says: for each rollout of a turn, in its order. In turn 0 these are all rollouts of the block,
    by slot and then by index."""

    texts: tuple[bytes, ...]
    """Different texts, each once: the rollouts of a group open alike."""
    said: tuple[EnvReply, ...]


class RolloutRecord(Message, frozen=True, omit_defaults=True):
    """A finished rollout as the host's stage played it."""

    digest: str
    """Of its token ids, authors, ending and rows: `rollout_digest`."""
    ending: Ending
    reward: float
    fault: str = ""
    """What the environment raised, as one line, if the rollout counts in nothing because of it."""
    outside: float | UnsetType = UNSET
    """Its score, if that is outside the environment's bounds."""


class GroupRecord(Message, frozen=True, omit_defaults=True):
    """A group as the host's stage played it; without rollouts if the slot is void."""

    slot: int
    rollouts: tuple[RolloutRecord, ...]
    why: Why = ""
    """Why the slot is void, as the host says it."""


class Record(Message, frozen=True):
    """All groups of a lease as the host's stage played them, msgpack. The log names its digest with the submission."""

    run: str
    lease: str
    version: int
    groups: tuple[GroupRecord, ...]


class Staged(Message, frozen=True):
    """What the coordinator asks its stage: to answer one turn, or for the record of a lease if there is no turn."""

    lease: str
    version: int
    blocks: tuple[Block, ...]
    turn: EnvTurn | None = None
    worker: str = ""
    """Key of the worker that holds the lease: what it keeps the stage busy with is limited."""


# --- comparison of a submission with its record ---


class RecordDifference(NamedTuple):
    """Why a group is not the recorded one."""

    rollout: int
    """Index of the rollout; -1 for the whole group."""
    detail: str


def rollout_digest(token_ids: bytes, author: bytes, ending: str, starts: Sequence[int] = ()) -> str:
    """The name of a rollout in a record: a hash of all that the environment and the policy decide."""
    rows = b"".join(start.to_bytes(8, "big", signed=True) for start in starts)
    return domain_hash("record", token_ids, author, ending.encode(), rows).hex()


def differs(rollout: Rollout, digest: str) -> bool:
    """Whether a rollout is not the one with this name."""
    try:
        name = rollout_digest(rollout.token_ids, rollout.author, rollout.ending, rollout.starts)
    except OverflowError:  # a start that no number of eight bytes holds
        return True
    return name != digest


def difference(group: Group, record: GroupRecord) -> RecordDifference | None:
    """The first difference between a group and its record; None if there is none."""
    if group.slot != record.slot:
        return RecordDifference(-1, f"a group of slot {group.slot} where the record has slot {record.slot}")
    if len(group.rollouts) != len(record.rollouts):
        return RecordDifference(-1, f"{len(group.rollouts)} rollouts where the record has {len(record.rollouts)}")
    for index, (rollout, recorded) in enumerate(zip(group.rollouts, record.rollouts, strict=True)):
        if differs(rollout, recorded.digest):
            return RecordDifference(index, "other tokens, authors or another ending than the host's stage recorded")
    return None

"""Turns: what a worker and the host tell each other while the host plays the environment, and what the host records of it.

Workers send turns and read the answers. The coordinator passes them on to the host's stage, and keeps one record for each
submission. Validators and auditors compare submissions with it. Texts travel as token ids, little-endian int32 in bytes.
"""

from typing import Literal

from msgspec import UNSET, UnsetType

from shoal.protocol.messages.base import Message
from shoal.protocol.messages.base import Said as Why
from shoal.protocol.messages.rollouts import POLICY, Block, Ending

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
    """Of its token ids, authors, ending and rows: `host_records.rollout_digest`."""
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

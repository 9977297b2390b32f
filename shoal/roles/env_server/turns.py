"""How a block advances, turn by turn: what a lease may send, what is played, and what is answered.

Here are the rules for retries and for blocks that change hands: a lease takes each turn once, the reply store answers
what it knows, and only the rest is played. It does not deal with the network or processes: `play` is an argument.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from shoal.errors import ShoalError
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_SAID_CHARS
from shoal.protocol.encoding import WireError, digest, to_msgpack
from shoal.protocol.messages.host_environments import rollout_digest
from shoal.roles.env_server.reply_store import (
    FinalScore,
    PlacedReply,
    Reply,
    ReplyStore,
    RolloutSoFar,
    Taken,
    group_name,
    next_path,
    opening_path,
)

VOID = Reply(b"", 0, "void", 0.0, t.POLICY)
"""With the cause as its fault."""


class Conflict(ShoalError):
    """What a lease asks for does not follow what it has taken here."""


class TurnRequest(NamedTuple):
    """A turn of one rollout that must be played."""

    slot: t.Slot
    rollout: int
    """Index in its group."""
    before: bytes
    """Path before the turn; empty for an opening."""
    written: bytes
    path: bytes


class TurnLimits(NamedTuple):
    """What a turn may hold."""

    vocabulary: int
    stop_ids: frozenset[int]


MOST_TURNS = 1 << 31
"""More than any rollout has tokens, and small enough for the reply store."""

Play = Callable[[Sequence[TurnRequest]], list[Reply]]
"""Plays turns of different rollouts; returns their replies in order."""

Judge = Callable[[t.Slot, Sequence[bytes]], list[FinalScore]]
"""What the rollouts of a slot, which have ended at these paths, earn when compared."""


def take_turn(
    reply_store: ReplyStore,
    asked: t.Staged,
    turn: t.EnvTurn,
    shared: Callable[[str], bool],
    size: int,
    limits: TurnLimits,
    play: Play,
) -> t.TurnAnswer:
    """The answer to a turn of a lease. `shared` says whether leases share the replies of a label, and `size` is the size of
    a group. Raises `WireError` for a turn that no honest worker sends, and `Conflict` for one out of order."""
    if not 0 <= turn.turn < MOST_TURNS:  # guard: number-of-a-turn
        raise WireError(f"turn {turn.turn}: turns count from 0")
    block, name = asked.blocks[0], digest(to_msgpack(turn))
    known = reply_store.taken(asked.lease, block.index, turn.turn)
    if known is not None and known.digest != name:  # guard: turn-taken-once
        raise Conflict(
            f"turn {turn.turn} of block {block.index} was taken with other tokens, and this lease goes on "
            "from those: give it back"
        )  # fmt: skip
    if turn.turn == 0:
        if turn.written:
            raise WireError("turn 0 asks for the openings, so nothing is written in it")
        owner = {slot.env: "" if shared(slot.env) else asked.lease for slot in block.slots}
        asks = [
            TurnRequest(slot, index, b"", b"", opening_path(asked.version, slot.slot, index, owner[slot.env]))
            for slot in block.slots
            for index in range(size)
        ]
        paths = tuple(ask.path for ask in asks)
    else:
        paths, asks = _continued(reply_store, asked, turn, size, limits)
    replies = reply_store.replies(ask.path for ask in asks)
    if known is None:
        new = [ask for ask in asks if ask.path not in replies]
        played = _whole_slots(new, play(new)) if new else []
        steps = [PlacedReply(ask.path, ask.before, ask.written, reply) for ask, reply in zip(new, played, strict=True)]
        replies |= reply_store.keep(asked.lease, asked.version, block.index, turn.turn, Taken(name, paths), steps)
    return _answer([replies[ask.path] for ask in asks])


def record_of(reply_store: ReplyStore, run: str, asked: t.Staged, size: int, judge: Judge) -> t.Record:
    """The record of a lease. Raises `Conflict` if one of its rollouts has not ended."""
    groups = []
    for block in asked.blocks:
        last = reply_store.last(asked.lease, block.index)
        paths = last.paths if last is not None else ()
        for place, slot in enumerate(block.slots):
            ends = paths[place * size : (place + 1) * size]
            rollouts = [reply_store.rollout(path) for path in ends]
            if not rollouts or any(played.last.ending == "" for played in rollouts):  # guard: record-of-the-ended
                raise Conflict(f"slot {slot.slot} is not played to its end here: give the lease back, or take all "
                               f"turns of block {block.index}")  # fmt: skip
            scores: Sequence[FinalScore] = [played.last.score for played in rollouts]
            if any(played.last.beside for played in rollouts):
                name = group_name(ends)
                scores = reply_store.judged(name) or reply_store.judge(name, asked.version, judge(slot, ends))
            why = next((played.last.fault for played in rollouts if played.last.ending == "void"), "")
            groups.append(t.GroupRecord(slot.slot, _recorded(rollouts, scores), t.fact(why, MAX_SAID_CHARS)))
    return t.Record(run, asked.lease, asked.version, tuple(groups))


def _recorded(rollouts: Sequence[RolloutSoFar], scores: Sequence[FinalScore]) -> tuple[t.RolloutRecord, ...]:
    recorded = []
    for played, score in zip(rollouts, scores, strict=True):
        ending = played.last.ending
        if ending != "" and ending != "void":
            name = rollout_digest(played.token_ids, played.author, ending, played.starts)
            outside = UNSET if score.outside is None else score.outside
            recorded.append(t.RolloutRecord(name, ending, score.reward, score.fault, outside))
    return tuple(recorded)


def _continued(
    reply_store: ReplyStore, asked: t.Staged, turn: t.EnvTurn, size: int, limits: TurnLimits
) -> tuple[tuple[bytes, ...], list[TurnRequest]]:
    """The paths after a turn, and what must be answered."""
    block = asked.blocks[0]
    before = reply_store.taken(asked.lease, block.index, turn.turn - 1)
    if before is None:  # guard: turns-in-order
        raise Conflict(
            f"turn {turn.turn} of block {block.index} comes before turn {turn.turn - 1}, or that one is "
            "forgotten: give the lease back"
        )  # fmt: skip
    replies, written = reply_store.replies(before.paths), iter(turn.written)
    still = sum(not replies[path].ending for path in before.paths)
    if not still or len(turn.written) != still:  # guard: turn-of-the-open
        raise WireError(f"turn {turn.turn} has {len(turn.written)} entries, but {still} rollouts are open")
    paths, asks = [], []
    for place, path in enumerate(before.paths):
        if not replies[path].ending:
            tokens, old = next(written), path
            _demand_turn(tokens, replies[path].room, limits)
            path = next_path(old, tokens)
            asks.append(TurnRequest(block.slots[place // size], place % size, old, tokens, path))
        paths.append(path)
    return tuple(paths), asks


def _demand_turn(written: bytes, room: int, limits: TurnLimits) -> None:
    """Raise `WireError` unless this is one whole turn of a policy: up to its first stop token, or as long as it may be."""
    if len(written) % 4 or not 4 <= len(written) <= 4 * room:  # guard: turn-fits-its-room
        raise WireError(f"a turn of {len(written)} bytes, where it may have 1 to {room} tokens of 4 bytes")
    tokens: list[int] = np.frombuffer(written, dtype="<i4").tolist()  # lists of a few tokens are faster than arrays
    if min(tokens) < 0 or max(tokens) >= limits.vocabulary:  # guard: turn-in-vocabulary
        raise WireError(f"a turn has a token outside the vocabulary of {limits.vocabulary}")
    end = next((place + 1 for place, token in enumerate(tokens) if token in limits.stop_ids), room)
    if len(tokens) != end:  # guard: turn-is-whole
        raise WireError(f"a turn of {len(tokens)} tokens where a stop token or its limit ends it after {end}")


def _whole_slots(asks: Sequence[TurnRequest], replies: Sequence[Reply]) -> list[Reply]:
    """A slot with a rollout that cannot begin is void as a whole: a group is complete or empty."""
    void = {ask.slot.slot: reply for ask, reply in zip(asks, replies, strict=True) if reply.ending == "void"}
    return [void.get(ask.slot.slot, reply) for ask, reply in zip(asks, replies, strict=True)]


def _answer(replies: Sequence[Reply]) -> t.TurnAnswer:
    texts = {words: place for place, words in enumerate(dict.fromkeys(reply.words for reply in replies))}
    said = tuple(t.EnvReply(texts[reply.words], reply.room, reply.ending, reply.author, reply.row) for reply in replies)
    return t.TurnAnswer(tuple(texts), said)

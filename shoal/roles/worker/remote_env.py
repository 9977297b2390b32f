"""Play a lease whose environments stay with the host: extend token ids, and ask for the environment's words after each
turn.

Blocks advance on their own, several at a time, so that the turn of one travels while the engine extends another, also
across two leases: `EngineShare` is what they share. Each turn of a block is one batch of its open rollouts in their order,
as in `envs/play_episodes`, so the bits are those of a worker that has the environments. Nothing that the host says about
sizes is trusted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shoal.chat.renderer import Renderer
from shoal.engine.interface import Continuation, Engine, EngineRequest
from shoal.envs.seat_history import TalkRow
from shoal.errors import PeerError
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_ROLLOUT_ROWS, MAX_ROLLOUT_TOKENS
from shoal.protocol.seed_chain import row_seed, sample_seed

log = logging.getLogger("worker")

AHEAD = 16
"""Blocks that are played at a time, of all leases together, if the memory allows it."""


class TooLate(Exception):
    """The lease is to be dropped. The text says why."""


class EngineShare:
    """What the leases of a worker share."""

    def __init__(self) -> None:
        self.engine = asyncio.Lock()
        self.places = asyncio.Semaphore(AHEAD)
        """Of blocks. They are taken in the order of the leases."""
        self.tokens = 0
        """Tokens that the engine has written, for all leases."""


class EngineTurn:
    """A lease's use of the engine."""

    def __init__(self, version: int = -1) -> None:
        self.version = version
        self.loaded, self.over = asyncio.Event(), asyncio.Event()
        """Whether the engine has the version, and whether it is needed no more."""
        self.shift = contextlib.AsyncExitStack()
        """Of the process on its device; it ends with the lease."""

    def end(self) -> None:
        self.loaded.set()
        self.over.set()

    async def follow(self, before: "EngineTurn") -> None:
        """Wait until the version may be loaded. Leases of one version use the engine together."""
        await (before.loaded if before.version == self.version else before.over).wait()  # guard: one-version-at-a-time


class PlayContext(NamedTuple):
    """What a lease is played with."""

    engine: Engine
    renderer: Callable[[], Renderer]
    group_size: int
    sampling: t.Sampling
    ask: Callable[[t.EnvTurn], Awaitable[t.TurnAnswer]]
    """Sends a turn to the host. It may take any time."""
    why_late: Callable[[], str]
    """Why the lease is to be dropped; empty if it goes on."""
    ready: Callable[[], Awaitable[int]]
    """Returns once the engine has the lease's version: how many of the lease's blocks may be played at a time."""


@dataclass
class _Rollout:
    """One rollout as it grows."""

    label: str
    seed: bytes
    rows: list[TalkRow] = field(default_factory=lambda: [TalkRow()])
    """In the order in which they opened."""
    row: int = 0
    """Index of the row that the next turn continues."""
    written: int = 0
    """Tokens of the policy's last turn."""
    room: int = 0
    ending: t.Outcome = ""

    @property
    def name(self) -> str:
        """What the engine calls the row."""
        return f"{self.label}-{self.row}"

    @property
    def context(self) -> list[int]:
        return self.rows[self.row].tokens

    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def packed(self, version: int) -> t.Rollout:
        assert self.ending not in ("", "void"), "a rollout that is sent has begun and ended"
        tokens, author, logprobs = (
            [value for row in self.rows for value in getattr(row, name)] for name in ("tokens", "author", "logprobs")
        )
        starts = tuple(accumulate(len(row.tokens) for row in self.rows[:-1]))
        return t.make_rollout(tokens, author, logprobs, version=version, ending=self.ending, starts=starts)  # type: ignore[arg-type]


async def play_blocks(table: PlayContext, blocks: Sequence[t.Block], hands: EngineShare) -> list[t.Group]:
    """Fill the slots of blocks, in their order. Openings are fetched before the engine is ready for the lease.

    Raises `TooLate`, what `ask` and `ready` raise, and `PeerError` if the host's answers cannot be those of an environment.
    """

    async def places() -> asyncio.Semaphore:
        return asyncio.Semaphore(await table.ready())

    async def play(block: t.Block) -> list[t.Group]:
        async with hands.places:
            opening = await table.ask(t.EnvTurn(block.index, 0))
            async with await asyncio.shield(own):
                return await _play_block(table, block, opening, hands)

    own = asyncio.create_task(places())
    tasks = [asyncio.create_task(play(block)) for block in blocks]
    try:
        await asyncio.wait([own, *tasks], return_when=asyncio.FIRST_EXCEPTION)
        for task in (own, *tasks):
            if task.done():
                task.result()  # the first that failed ends the others
        return [group for task in tasks for group in task.result()]
    finally:
        for task in (own, *tasks):
            task.cancel()
        await asyncio.gather(own, *tasks, return_exceptions=True)


async def _play_block(table: PlayContext, block: t.Block, answer: t.TurnAnswer, hands: EngineShare) -> list[t.Group]:
    """Fill the slots of a block, given the answer to its turn 0."""
    seeds = [(slot, bytes.fromhex(slot.seed), index) for slot in block.slots for index in range(table.group_size)]
    rollouts = [
        _Rollout(f"{slot.slot}-{index}-{slot.seed[:16]}", sample_seed(seed, index)) for slot, seed, index in seeds
    ]
    open_, turn = rollouts, 0
    try:
        while open_:
            names = [rollout.name for rollout in open_]
            _take(table, answer, open_)
            open_ = [rollout for rollout in open_ if not rollout.ending]
            going_on = {rollout.name for rollout in open_}
            table.engine.forget([name for name in names if name not in going_on])
            if open_:
                if why := table.why_late():
                    raise TooLate(why)
                turn += 1
                answer = await table.ask(t.EnvTurn(block.index, turn, await _extend(table, open_, hands)))
    finally:
        table.engine.forget([rollout.name for rollout in open_])
    return _groups(table, block, rollouts)


async def _extend(table: PlayContext, open_: Sequence[_Rollout], hands: EngineShare) -> tuple[bytes, ...]:
    """Let the policy write a turn in each open rollout, as one batch."""
    stop_ids = table.renderer().stop_ids
    requests = [EngineRequest(r.name, r.context, row_seed(r.seed, r.row), r.room, stop_ids) for r in open_]
    async with hands.engine:
        work = asyncio.ensure_future(asyncio.to_thread(table.engine.extend, requests, table.sampling.temperature))
        try:
            turns = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])  # before anybody else uses the engine
            raise
        hands.tokens += sum(len(turn.token_ids) for turn in turns)
    return tuple(_write(rollout, turn) for rollout, turn in zip(open_, turns, strict=True))


def _write(rollout: _Rollout, turn: Continuation) -> bytes:
    row = rollout.rows[rollout.row]
    row.append(turn.token_ids, t.POLICY)
    row.logprobs.extend(turn.logprobs)
    rollout.written = len(turn.token_ids)
    return np.asarray(turn.token_ids, dtype="<i4").tobytes()


def _take(table: PlayContext, answer: t.TurnAnswer, open_: Sequence[_Rollout]) -> None:
    """Append what the environment says. Raises `PeerError` if it does not fit: the check `shape` would blame the
    worker."""
    texts = [_token_ids(text, table.renderer().vocabulary) for text in answer.texts]
    if len(answer.said) != len(open_):  # guard: answers-for-the-open
        raise _wrong(f"{len(answer.said)} answers for {len(open_)} rollouts")
    for rollout, said in zip(open_, answer.said, strict=True):
        if not 0 <= said.text < len(texts):  # guard: answer-names-a-text
            raise _wrong(f"text {said.text} of {len(texts)}")
        if said.author not in (t.POLICY, t.UNTRAINED):  # guard: answer-names-an-author
            raise _wrong(f"author {said.author}")
        if said.ending not in ("", "void") and not rollout.written:  # guard: no-end-before-a-turn
            raise _wrong(f"ending {said.ending!r} before the first turn")
        author = rollout.rows[rollout.row].author
        author[len(author) - rollout.written :] = [said.author] * rollout.written
        _open_row(rollout, said)
        row = rollout.rows[rollout.row]
        row.append(texts[said.text], t.ENVIRONMENT)
        _demand_room(table.sampling, rollout, said)
        rollout.room, rollout.ending, rollout.written = said.room, said.ending, 0


def _demand_room(limits: t.Sampling, rollout: _Rollout, said: t.EnvReply) -> None:
    """Raise `PeerError` unless what was said leaves as much room as it says."""
    row = rollout.rows[rollout.row]
    length, in_all, in_turn = len(row.tokens), rollout.num_tokens(), row.num_in_turn()
    most_in_all = min(limits.all_tokens, MAX_ROLLOUT_TOKENS)
    # guard: closing-words-fit
    if length > limits.max_tokens or in_all > most_in_all:
        raise _wrong(f"a row of {length} tokens in a rollout of {in_all}, limits {limits.max_tokens} and {most_in_all}")
    # guard: silence-begins-no-turn
    most = min(limits.max_turn_tokens - in_turn, limits.max_tokens - length, most_in_all - in_all)
    least = 0 if said.ending else 1
    if not least <= said.room <= max(0, most) * least:  # guard: room-within-the-limits
        raise _wrong(f"room for {said.room} tokens after {length}, ending {said.ending!r}")
    if not row.tokens and not said.ending:  # guard: opening-says-something
        raise _wrong("an empty opening")


def _open_row(rollout: _Rollout, said: t.EnvReply) -> None:
    """Go to the row that goes on, or open another. Raises `PeerError`."""
    count = len(rollout.rows)
    most = count if rollout.written and not said.ending else rollout.row
    if not 0 <= said.row <= most or (said.ending and said.row != rollout.row):  # guard: answer-names-a-row
        raise _wrong(f"row {said.row} of {count}, ending {said.ending!r}")
    if said.row == count:
        if count == MAX_ROLLOUT_ROWS:  # guard: rows-that-a-host-opens
            raise _wrong(f"more than {MAX_ROLLOUT_ROWS} rows")
        rollout.rows.append(TalkRow())
    rollout.row = said.row


def _token_ids(text: bytes, vocabulary: int) -> list[int]:
    if len(text) % 4:  # guard: text-of-whole-tokens
        raise _wrong(f"a text of {len(text)} bytes")
    tokens_T = np.frombuffer(text, dtype="<i4")
    if len(tokens_T) and (tokens_T.min() < 0 or tokens_T.max() >= vocabulary):  # guard: text-in-vocabulary
        raise _wrong("a token outside the vocabulary")
    return tokens_T.tolist()


def _groups(table: PlayContext, block: t.Block, rollouts: Sequence[_Rollout]) -> list[t.Group]:
    groups, failed = [], list[str]()
    for slot, own in zip(block.slots, _of_each(rollouts, table.group_size), strict=True):
        void = {rollout.ending == "void" for rollout in own}
        if len(void) > 1:  # guard: group-is-void-or-whole
            raise _wrong(f"slot {slot.slot} is void for some of its rollouts only")
        if any(rollout.ending == "error" for rollout in own):
            failed.append(f"{slot.env:.64} {slot.task}")
        packed = () if True in void else tuple(rollout.packed(table.engine.version) for rollout in own)
        groups.append(t.Group(slot.slot, slot.task, slot.env, packed))
    if failed:
        log.warning(
            "the host's environment failed on tasks=%r, and its logs/stage.log says why; your pay does not depend on it",
            ", ".join(failed),
        )
    return groups


def _of_each(rollouts: Sequence[_Rollout], size: int) -> list[Sequence[_Rollout]]:
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def _wrong(what: str) -> PeerError:
    return PeerError(
        f"the host answered a turn with {what}, which no environment says: leave this run, and tell the host"
    )

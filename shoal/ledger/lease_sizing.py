"""Sizes of leases by worker speed, and the order in which dropped blocks are leased again."""

from collections.abc import Iterable, Iterator, Sequence

from shoal.ledger.batch_selection import blocks_in_the_way, is_fresh
from shoal.ledger.state import State, once_per_event
from shoal.ledger.state_records import BlockRecord, LeaseRecord, NodeRecord, StreamRecord
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.constants import MAX_LEASE_BLOCKS
from shoal.protocol.continuations import FIRST_BLOCK, is_continued, work_of_block
from shoal.protocol.encoding import float_sum

# --- How fast workers are, and so how many blocks a lease has, and until when ---
#
# The log shows the time between a worker's submissions, and that limits the size of its leases. What it claims about its
# speed can only make them smaller.


RECENT_LEASES = 10
"""A worker counts in the usual pace if it submitted at most this many times `lease_s` before the newest submission."""


@once_per_event
def usual_pace_s(state: State) -> float:
    """Seconds that the run's workers need for a block; 0 before the first accepted one. Workers that are at least as
    quick could make half of all blocks, so only many deliberately slow keys could change it."""
    done = [member for member in state.members.values() if member.pace_s and not member.left]
    since = max((member.sent_at for member in done), default=0.0) - RECENT_LEASES * state.rules.lease_s
    # guard: pace-of-good-standing, pace-of-those-at-work
    paces = sorted(member.pace_s for member in done if member.standing == "good" and member.sent_at >= since)
    half = float_sum(1.0 / pace for pace in paces) / 2  # guard: pace-by-speed
    for pace in paces:
        half -= 1.0 / pace
        if half <= 0:
            return pace
    return 0.0


def is_slow(state: State, member: NodeRecord) -> bool:
    """Whether a worker takes clearly longer than is usual. Others could make what it holds."""
    return member.pace_s > state.law.soft_times * usual_pace_s(state)


def patience_ends(state: State, lease: LeaseRecord) -> float:
    """Until when others wait for a lease that holds up the run, seconds since the epoch."""
    wait_s = max(state.law.least_soft_s, state.law.patience_times * usual_pace_s(state) * work_of(state, lease.blocks))
    return lease.issued + wait_s


def work_of(state: State, blocks: Iterable[int]) -> float:
    """How many ordinary blocks these are worth."""
    vine = vine_of(state.rules.algorithm)
    return float_sum(work_of_block(vine) if vine and is_continued(block) else 1.0 for block in blocks)


def blocks_for_speed(state: State, member: NodeRecord, tokens_per_s: float, continued: bool = False) -> int:
    """Blocks, of continuations or others, that a worker should be able to make in `Law.lease_target_s`. `tokens_per_s` is
    what it claims."""
    if not state.accepted_groups:
        return 1
    tokens_per_block = state.block_tokens / state.accepted_groups * state.rules.block_groups
    in_time = tokens_per_s * state.law.lease_target_s / max(1.0, tokens_per_block)
    if member.pace_s:
        in_time = min(in_time, state.law.lease_target_s / member.pace_s)  # guard: measured-speed
    if continued:
        in_time /= work_of(state, (FIRST_BLOCK,))
    return int(max(1.0, min(MAX_LEASE_BLOCKS, in_time)))  # guard: claimed-speed


def lease_times(state: State, member: NodeRecord, blocks: Sequence[int], now: float) -> tuple[float, float]:
    """Soft time and deadline of a lease. A worker that was slow before gets more time. For a newcomer, the usual time in
    the run counts."""
    law, longest_s = state.law, state.rules.lease_s * work_of(state, blocks)
    in_hand = float_sum(
        work_of(state, held) for held in (blocks, *(x.blocks for x in state.open_leases_of(member.key)))
    )
    due_s = (member.pace_s or usual_pace_s(state)) * in_hand
    longest_s = min(
        longest_s, max(state.rules.lease_s, law.deadline_times * due_s)
    )  # guard: deadline-near-the-due-time
    soft_s = max(law.least_soft_s, law.soft_times * due_s) if due_s else longest_s
    return now + min(soft_s, longest_s), now + longest_s


# --- Which blocks that were leased before are leased to other workers, to whom, and when ---
#
# A worker can compute its own rewards. If dropped blocks were not leased again, workers could bias training by dropping
# rollouts. So a block that is given back, that is late, or that the next batch waits for goes to a worker with a good
# record, before any new block is leased. Its slots keep their seeds, so the policy learns from the same tokens, whichever
# worker makes them.


@once_per_event
def reliable(state: State) -> frozenset[str]:
    """Keys of workers with a good record: probation is over, and they left few blocks to others."""
    return frozenset(
        member.key
        for member in state.members.values()
        if member.role == "worker" and member.standing == "good" and not member.left
        # guard: reliable-is-proven
        and member.valid_blocks >= state.law.probation_blocks
        # guard: reliable-fills-its-blocks
        and member.unfilled <= state.law.unfilled_share * member.given
    )  # fmt: skip


def blocks_to_reassign(
    state: State, stream: StreamRecord, member: NodeRecord, others: Sequence[NodeRecord], now: float, room: int
) -> list[tuple[int, int]]:
    """(version, block) of the blocks that this worker may be given now: all of one version, the oldest that has some.

    `room` is the number of new groups that may be leased.
    """
    version, found = -1, list[tuple[int, int]]()
    for place in sorted(_to_reassign(state, stream, now, room)):
        block = stream.versions[place[0]].blocks[place[1]]
        if place[0] in (version, place[0] if version < 0 else version) and _may_make(state, block, member, others, now):
            version = place[0]
            found.append(place)
    return found


def num_to_reassign(state: State, stream: StreamRecord, now: float, room: int) -> int:
    """Number of blocks that some worker could be given at once; `room` is as above."""
    blocks = (stream.versions[version].blocks[number] for version, number in _to_reassign(state, stream, now, room))
    return sum(block.status == "free" or len(block.holders) < state.law.block_workers for block in blocks)


def _to_reassign(state: State, stream: StreamRecord, now: float, room: int) -> set[tuple[int, int]]:
    held_up = _held_up(state, stream, now) if room <= 0 else ()  # guard: late-without-room
    return {*stream.free, *_late(state, stream, now), *_in_the_way(state, stream, now), *held_up}


def _late(state: State, stream: StreamRecord, now: float) -> Iterator[tuple[int, int]]:
    for lease in (state.leases[name] for name in state.due_by(now, "soft", state.open_leases)):
        blocks = stream.versions[lease.version].blocks if is_fresh(state, stream, lease.version) else {}
        for number in lease.blocks if blocks else ():
            if blocks[number].status == "leased" and blocks[number].lease == lease.id:
                yield lease.version, number


def _held_up(state: State, stream: StreamRecord, now: float) -> Iterator[tuple[int, int]]:
    """Blocks whose worker takes much longer than is usual. While nothing new can be leased, others may make them. Otherwise
    workers that are slow on purpose would take all of the run's room."""
    leases = map(state.leases.__getitem__, state.open_leases if usual_pace_s(state) else ())
    for lease in (x for x in leases if x.stream == stream.name and now > patience_ends(state, x)):
        blocks = stream.versions[lease.version].blocks
        for number in lease.blocks if is_fresh(state, stream, lease.version) else ():
            if blocks[number].status == "leased" and blocks[number].lease == lease.id:
                yield lease.version, number


def _in_the_way(state: State, stream: StreamRecord, now: float) -> Iterator[tuple[int, int]]:
    """Of the blocks that the next batch waits for: those that are free, those whose newest submission validators dispute or
    do not judge, and those whose newest worker has no good record, or has had `Law.patience_times` the usual time."""
    for version, number in blocks_in_the_way(state, stream):
        if number not in stream.versions[version].blocks:  # nobody was leased it yet
            continue
        newest = state.leases[stream.versions[version].blocks[number].lease]
        if newest.status == "submitted":  # guard: made-again-once
            sent = state.submissions[newest.submission]
            # guard: disputed-is-reassigned, unjudged-is-reassigned
            if sent.verdicts or now > sent.time + state.law.turn_s:
                yield version, number
            continue
        # guard: waits-for-a-good-record
        if newest.worker not in reliable(state) or now > patience_ends(state, newest):
            yield version, number


def may_retry_stopped(member: NodeRecord, others: Sequence[NodeRecord], block: BlockRecord) -> bool:
    """Whether a block that was stopped waits for none of the others: an environment stopped it on each of them since it did
    on this worker, whose leases of it all ended so. One that let it lapse otherwise may hold it without playing it."""
    stops = block.stopped.workers if block.stopped else []
    if block.holders.count(member.key) > stops.count(member.key):  # guard: idle-waits-like-others
        return False
    since = stops[::-1].index(member.key) if member.key in stops else len(stops)
    return bool(stops) and {other.key for other in others} <= {*stops[len(stops) - since :]}  # guard: stopped-in-turn


def _may_make(state: State, block: BlockRecord, member: NodeRecord, others: Sequence[NodeRecord], now: float) -> bool:
    """Whether this worker may be given the block. Nobody gets a block twice, and workers with a good record come first. A
    free block waits for them for `lease_s`, and no longer, because they may be gone."""
    if block.status == "free":
        if may_retry_stopped(member, others, block):  # guard: stopped-on-others-waits-for-none
            return True
        if now >= block.free_since + state.rules.lease_s or not others:  # guard: waits-for-a-while
            return True
    elif len(block.holders) >= state.law.block_workers or not member.accepted:  # guard: held-by-few
        return False
    if member.key in block.holders:  # guard: not-twice
        return False
    trusted = reliable(state)
    if any(key not in block.holders for key in trusted):
        return member.key in trusted  # guard: good-record-first
    proven = any(other.accepted and other.key not in block.holders for other in others)
    return bool(member.accepted) or not proven  # guard: proven-first

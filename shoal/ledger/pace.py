"""How fast workers are, and so how many blocks a lease has, and until when. Pure: it reads a state.

Used by the rules of leases. The log shows the time between a worker's submissions, and that limits the size of its leases.
What it claims about its speed can only make them smaller.
"""

from collections.abc import Iterable, Sequence

from shoal.ledger.once import once_per_event
from shoal.ledger.state import State
from shoal.ledger.state_records import LeaseRecord, Member
from shoal.protocol.algorithms import vine_of
from shoal.protocol.constants import MAX_LEASE_BLOCKS
from shoal.protocol.continuations import FIRST_BLOCK, is_continued, work_of_block
from shoal.protocol.wire import float_sum

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


def is_slow(state: State, member: Member) -> bool:
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


def blocks_for_speed(state: State, member: Member, tokens_per_s: float, continued: bool = False) -> int:
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


def lease_times(state: State, member: Member, blocks: Sequence[int], now: float) -> tuple[float, float]:
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

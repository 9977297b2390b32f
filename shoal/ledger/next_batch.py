"""What the next batch would take, and which blocks it waits for. Pure: it reads a state.

Used by the rules of batches and of leases. A group may be learned from until it is `max_staleness` versions old. So each
version has a last batch. From version 2 of the rules on, that batch waits for every block of the version. Otherwise a
worker could keep a group that it does not like until it is too old.
"""

from collections import Counter

from shoal.ledger.once import once_per_event
from shoal.ledger.state import BlockRecord, State, StreamRecord
from shoal.protocol.types import Rules


def groups_a_worker(rules: Rules) -> int:
    """Groups of a batch that one worker may fill, at most."""
    # guard: share-of-a-batch
    return max(1, int(rules.worker_share * rules.batch_groups + 1e-9))  # 0.29 * 100 is a little below 29


def is_fresh(state: State, stream: StreamRecord, version: int) -> bool:
    """Whether the next batch may take groups of a version."""
    return len(stream.batches) - version <= state.rules.max_staleness


def usable(state: State, stream: StreamRecord) -> list[tuple[int, int]]:
    """Accepted groups with signal that the next batch may take, in the order of acceptance."""
    return [place for place in stream.pool if is_fresh(state, stream, place[0])]


def next_members(state: State, stream: StreamRecord) -> list[tuple[int, int]]:
    """Groups that the next batch would take now, the oldest version first, then by slot; none beyond its worker's share.
    Before version 2 of the rules, they come in the order of acceptance."""
    members: list[tuple[int, int]] = []
    taken, most = Counter[str](), groups_a_worker(state.rules)
    places = usable(state, stream)
    for place in sorted(places) if state.law.version >= 2 else places:  # guard: oldest-first
        maker = state.maker_of(stream, place)
        if taken[maker] < most and len(members) < state.rules.batch_groups:  # guard: share-of-the-next-batch
            taken[maker] += 1
            members.append(place)
    return members


@once_per_event
def blocks_in_the_way(state: State, stream: StreamRecord) -> list[tuple[int, int]]:
    """(version, block) of the blocks that the next batch waits for, although other groups would fill it: those that are not
    final, of the version for which it is the last batch."""
    oldest = len(stream.batches) - state.rules.max_staleness
    if state.law.version < 2 or not state.rules.max_staleness or oldest not in stream.versions:
        return []
    if len(next_members(state, stream)) < state.rules.batch_groups:
        return []
    blocks = sorted(stream.versions[oldest].blocks.items())
    return [(oldest, number) for number, block in blocks if _may_still_come(state, block)]


def _may_still_come(state: State, block: BlockRecord) -> bool:
    """Whether a group of a block may still be accepted. In a run that drains, nobody makes free blocks. A submitted block
    that `Law.block_workers` workers have had is not waited for: no validator could judge it."""
    if block.status == "free":
        return state.phase != "draining"  # guard: free-in-a-drain, free-in-a-pause
    return block.status == "leased" or (block.status == "submitted" and len(block.holders) < state.law.block_workers)

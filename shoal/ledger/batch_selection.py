"""Selection of the groups of the next batch, and the number of groups that batches still want."""

from collections import Counter
from collections.abc import Iterator

from shoal.ledger.state import State, once_per_event
from shoal.ledger.state_records import BlockRecord, StreamRecord
from shoal.protocol.algorithm_config import vine_of
from shoal.protocol.continuations import FIRST_BLOCK, continued_slot, is_continued
from shoal.protocol.messages import Rules

# --- What the next batch would take, and which blocks it waits for ---
#
# A group may be learned from until it is `max_staleness` versions old. So each version has a last batch, which waits for
# every block of the version. Otherwise a worker could keep a group that it does not like until it is too old.
#
# Where the run's algorithm learns from continuations, a batch takes a group once its continuations are final: accepted,
# or void by an event. What has arrived by then decides nothing.


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
    """Groups that the next batch would take now, the oldest version first, then by slot; none beyond its worker's share."""
    members: list[tuple[int, int]] = []
    taken, most = Counter[str](), groups_a_worker(state.rules)
    ready = sorted(place for place in usable(state, stream) if is_settled(state, stream, place))  # guard: oldest-first
    for place in ready:
        maker = state.maker_of(stream, place)
        if taken[maker] < most and len(members) < state.rules.batch_groups:  # guard: share-of-the-next-batch
            taken[maker] += 1
            members.append(place)
    return members


def first_by_slot(state: State, stream: StreamRecord, version: int) -> Iterator[tuple[int, int]]:
    """In a synchronous run: the first groups with signal by slot number, once every lower slot is final."""
    slots, slot, found = stream.versions[version].slots, 0, 0
    while slot in slots and found < state.rules.batch_groups:
        if slots[slot].status == "signal":
            found += 1
            yield version, slot
        slot += 1


def is_settled(state: State, stream: StreamRecord, place: tuple[int, int]) -> bool:
    """Whether a group needs no continuations, or they are final."""
    version, slot = place
    final = continued_slot(slot, state.rules.block_groups) in stream.versions[version].slots
    return final or vine_of(state.rules.algorithm) is None


@once_per_event
def blocks_to_continue(state: State, stream: StreamRecord) -> list[tuple[int, int]]:
    """(version, block) of the blocks of continuations that nobody was leased yet, ascending: of groups that a batch may
    take, or in a synchronous run, that the next batch will take."""
    if vine_of(state.rules.algorithm) is None:
        return []
    parents, step = usable(state, stream), len(stream.batches)
    if state.rules.max_staleness == 0:  # guard: members-are-continued
        parents = list(first_by_slot(state, stream, step)) if step in stream.versions else []
    found = {
        (version, slot // state.rules.block_groups + FIRST_BLOCK)
        for version, slot in parents
        if not is_settled(state, stream, (version, slot))
    }
    return sorted((version, block) for version, block in found if block not in stream.versions[version].blocks)


@once_per_event
def blocks_in_the_way(state: State, stream: StreamRecord) -> list[tuple[int, int]]:
    """(version, block) of the blocks that the next batch waits for, although other groups would fill it: those that are not
    final, of the version for which it is the last batch. Some of continuations may not be leased yet."""
    oldest = len(stream.batches) - state.rules.max_staleness
    if not state.rules.max_staleness or oldest not in stream.versions:
        return []
    if len(next_members(state, stream)) < state.rules.batch_groups:
        return []
    blocks = sorted(stream.versions[oldest].blocks.items())
    unbegun = [place for place in blocks_to_continue(state, stream) if place[0] == oldest]
    coming = [(oldest, number) for number, block in blocks if _may_still_come(state, block)]
    return coming + unbegun  # guard: last-batch-continues


def _may_still_come(state: State, block: BlockRecord) -> bool:
    """Whether a group of a block may still be accepted. In a run that drains, nobody makes free blocks. A submitted block
    that `Law.block_workers` workers have had is not waited for: no validator could judge it."""
    if block.status == "free":
        return state.phase != "draining"  # guard: free-in-a-drain, free-in-a-pause
    return block.status == "leased" or (block.status == "submitted" and len(block.holders) < state.law.block_workers)


# --- How many groups the coming batches have already, and how many more may be leased for them ---
#
# Continuations fill no batch, so they count only as work that somebody has.


@once_per_event
def groups_wanted(state: State, stream: StreamRecord) -> int:
    """Groups that may still be leased: accepted and in flight stay below (max_staleness + 1) batches."""
    batches, each = open_batches(state, stream), groups_a_worker(state.rules)
    # What a worker has beyond its share will fill no batch; counting it would keep the others from work for ever.
    # guard: surplus-is-not-counted
    had = sum(min(groups, each * batches) for groups in supply(state, stream).values())
    return batches * state.rules.batch_groups - had


def open_batches(state: State, stream: StreamRecord) -> int:
    """Batches that may be formed before the trainer publishes again."""
    steps_left = state.rules.steps - stream.version
    return min(state.rules.max_staleness + 1, steps_left) - (len(stream.batches) - stream.version)


@once_per_event
def supply(state: State, stream: StreamRecord) -> Counter[str]:
    """Groups for the coming batches by worker: accepted, leased, or submitted and not yet judged."""
    accepted = Counter(state.maker_of(stream, place) for place in usable(state, stream))
    return accepted + _in_flight(state, stream, continued=False)  # guard: continuations-fill-no-batch


def groups_in_flight(state: State, stream: StreamRecord) -> int:
    """Groups leased, or submitted and not yet judged, of versions that can still be learned from."""
    return in_flight(state, stream).total()


@once_per_event
def in_flight(state: State, stream: StreamRecord) -> Counter[str]:
    """The same by worker."""
    return _in_flight(state, stream, continued=True)


def _in_flight(state: State, stream: StreamRecord, *, continued: bool) -> Counter[str]:
    oldest, groups = max(0, stream.version - state.rules.max_staleness), Counter[str]()
    for version in range(oldest, len(stream.versions)):
        for number, block in stream.versions[version].blocks.items():
            if block.status in ("leased", "submitted") and (continued or not is_continued(number)):
                groups[state.leases[block.lease].worker] += state.rules.block_groups
    return groups

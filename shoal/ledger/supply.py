"""How many groups the coming batches have already, and how many more may be leased for them. Pure: it reads a state.

Used by the rules of leases, and by the coordinator's board. Continuations fill no batch, so they count only as work that
somebody has.
"""

from collections import Counter

from shoal.ledger.next_batch import groups_a_worker, usable
from shoal.ledger.once import once_per_event
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord
from shoal.protocol.continuations import is_continued


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
    """The same, with or without groups of continuations."""
    oldest, groups = max(0, stream.version - state.rules.max_staleness), Counter[str]()
    for version in range(oldest, len(stream.versions)):
        for number, block in stream.versions[version].blocks.items():
            if block.status in ("leased", "submitted") and (continued or not is_continued(number)):
                groups[state.leases[block.lease].worker] += state.rules.block_groups
    return groups

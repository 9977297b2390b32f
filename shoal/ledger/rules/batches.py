"""Which accepted groups make the next batch."""

from collections.abc import Iterator

from shoal.ledger.entry import Body
from shoal.ledger.facts.batches import BatchFormed
from shoal.ledger.next_batch import blocks_in_the_way, next_members, usable
from shoal.ledger.past import Table
from shoal.ledger.state import State, StreamRecord


def form_batch(state: State, stream: StreamRecord) -> list[Body]:
    """The next batch, if it is due and its groups are there."""
    step, rules = len(stream.batches), state.rules
    if step >= rules.steps or step > stream.version + rules.max_staleness:
        return []
    members = list(_first_by_slot(state, stream, step)) if rules.max_staleness == 0 else next_members(state, stream)
    if len(members) < rules.batch_groups or blocks_in_the_way(state, stream):  # guard: last-batch-waits
        return []
    return [BatchFormed(step, tuple(sorted(members)), stream.name)]


def groups_beyond_share(state: State, stream: StreamRecord) -> int:
    """Usable groups that the next batch leaves out because their workers have filled their share of it."""
    members = next_members(state, stream)
    return len(usable(state, stream)) - len(members) if len(members) < state.rules.batch_groups else 0


def _first_by_slot(state: State, stream: StreamRecord, version: int) -> Iterator[tuple[int, int]]:
    """In a synchronous run: the first groups with signal by slot number, once every lower slot is final."""
    slots, slot, found = stream.versions[version].slots, 0, 0
    while slot in slots and found < state.rules.batch_groups:
        if slots[slot].status == "signal":
            found += 1
            yield version, slot
        slot += 1


COMMANDS: Table = {}
CAUSES: Table = {}
LINES: Table = {}

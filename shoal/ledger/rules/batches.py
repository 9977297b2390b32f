"""Which accepted groups make the next batch."""

from shoal.ledger.entry import Body
from shoal.ledger.facts.batches import BatchFormed
from shoal.ledger.next_batch import blocks_in_the_way, first_by_slot, is_settled, next_members, usable
from shoal.ledger.past import Table
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord


def form_batch(state: State, stream: StreamRecord) -> list[Body]:
    """The next batch, if it is due and its groups are there."""
    step, rules = len(stream.batches), state.rules
    if step >= rules.steps or step > stream.version + rules.max_staleness:
        return []
    synchronous = rules.max_staleness == 0
    members = list(first_by_slot(state, stream, step)) if synchronous else next_members(state, stream)
    if len(members) < rules.batch_groups or blocks_in_the_way(state, stream):  # guard: last-batch-waits
        return []
    if not all(is_settled(state, stream, place) for place in members):  # guard: batch-waits-for-continuations
        return []
    return [BatchFormed(step, tuple(members), stream.name)]


def groups_beyond_share(state: State, stream: StreamRecord) -> int:
    """Usable groups that the next batch leaves out because their workers have filled their share of it."""
    members = next_members(state, stream)
    ready = [place for place in usable(state, stream) if is_settled(state, stream, place)]
    return len(ready) - len(members) if len(members) < state.rules.batch_groups else 0


COMMANDS: Table = {}
CAUSES: Table = {}
LINES: Table = {}

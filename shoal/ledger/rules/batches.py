"""Which accepted groups make the next batch."""

from collections.abc import Iterator

from msgspec import UNSET

from shoal.ledger.entry import Body
from shoal.ledger.facts.batches import BatchFormed
from shoal.ledger.next_batch import Members, blocks_in_the_way, first_by_slot, is_settled, next_members, usable
from shoal.ledger.past import Table, Told
from shoal.ledger.state import State
from shoal.ledger.state_records import StreamRecord
from shoal.protocol.accounts import CreditLine


def form_batch(state: State, stream: StreamRecord) -> list[Body]:
    """The next batch, if it is due and its groups are there."""
    step, rules = len(stream.batches), state.rules
    if step >= rules.steps or step > stream.version + rules.max_staleness:
        return []
    synchronous = rules.max_staleness == 0
    members = Members(list(first_by_slot(state, stream, step)), []) if synchronous else next_members(state, stream)
    if len(members.all) < rules.batch_groups or blocks_in_the_way(state, stream):  # guard: last-batch-waits
        return []
    if not all(is_settled(state, stream, place) for place in members.new):  # guard: batch-waits-for-continuations
        return []
    return [BatchFormed(step, tuple(members.all), stream.name, tuple(sorted(members.repeated)) or UNSET)]


def groups_beyond_share(state: State, stream: StreamRecord) -> int:
    """Usable groups that the next batch leaves out because their workers have filled their share of it."""
    members = next_members(state, stream)
    ready = [place for place in usable(state, stream) if is_settled(state, stream, place)]
    left_out = len(ready) - len(members.new)
    return left_out if len(members.all) < state.rules.batch_groups else 0


def lines_of_batch_formed(body: BatchFormed, told: Told) -> Iterator[CreditLine]:
    """Each further use of a group: it was paid when it was accepted, so a use brings no pay."""
    stream = told.state.streams[body.stream]
    for version, slot in body.repeated or ():
        if told.state.maker_of(stream, (version, slot)) == told.node:
            use = sum((version, slot) in stream.batches.get(step, ()) for step in range(version, body.step + 1))
            which = f"use {use} of at most {told.state.rules.group_uses}"
            yield told.line(f"learned from again by step {body.step}, {which}: paid once", version=version, slot=slot)


COMMANDS: Table = {}
CAUSES: Table = {}
LINES: Table = {BatchFormed: lines_of_batch_formed}

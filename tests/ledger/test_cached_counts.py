"""Counts that are kept from event to event equal counts made anew, and are not part of a state."""

import sys

import pytest

from shoal.ledger import batch_selection, lease_granting
from shoal.ledger.commands import Admin, ReturnLeases
from shoal.ledger.errors import Wait
from shoal.ledger.event_types import apply
from shoal.ledger.log.writer import checked_entry
from shoal.ledger.state import State, state_hash
from shoal.protocol.messages import AdminRequest
from tests.ledger.ledger_fixture import World
from tests.ledger.test_random_walk import Walk

OF_A_STREAM = (batch_selection.supply, batch_selection.in_flight, batch_selection.groups_wanted)
OF_A_RUN = (lease_granting._workers, lease_granting._num_good_workers)
WORKERS = tuple(letter * 64 for letter in "abcdef")


def a_random_run(tmp_path, seed):
    """A run with every kind of event that changes who has which blocks."""
    walk = Walk(tmp_path, seed, validators=1, staleness=1)
    for number in range(400):
        walk.step(honest=number % 4 > 0)
    return walk


@pytest.mark.parametrize("seed", range(2))
def test_kept_counts_equal_fresh_counts_after_every_event_of_a_log(tmp_path, seed):
    world, state = a_random_run(tmp_path, seed), State()
    for data, stored_hash in world.log_writer.store.read():
        apply(state, checked_entry(state, data, stored_hash))
        if state.main.version < 0:
            continue
        for count, of in [*((count, (state.main,)) for count in OF_A_STREAM), *((count, ()) for count in OF_A_RUN)]:
            assert count(state, *of) == count.__wrapped__(state, *of) == count(state, *of), (state.seq, count.__name__)
    assert state.main.version > 1 and len(state.leases) > 20
    bare = world.audit().state
    bare.__dict__.clear()
    assert world.state.__dict__ and state_hash(world.state) == state_hash(bare) and world.state == bare
    assert batch_selection.groups_in_flight(state, state.main) == batch_selection.groups_in_flight(
        world.state, world.state.main
    )


def test_a_count_is_made_once_for_each_event(tmp_path, monkeypatch):
    world, looks = World(tmp_path), []
    world.publish()
    for key in WORKERS:
        world.enter(key)

    def usable(state, stream):
        if sys._getframe(1).f_code.co_name == "supply":
            looks.append(state.seq)
        return []

    monkeypatch.setattr(batch_selection, "usable", usable)
    for key in WORKERS[:4]:
        world.lease(key)
    for key in WORKERS[4:] * 3:
        with pytest.raises(Wait, match="enough groups are in flight"):
            world.lease(key)
    assert len(looks) == len(set(looks)) == 5


def test_a_lease_is_given_exactly_while_there_are_blocks_to_give(tmp_path):
    world = World(tmp_path)
    assert lease_granting.blocks_to_give(world.state, world.state.main, world.now) == 0
    world.publish()
    for number, key in enumerate(WORKERS):
        world.enter(key)
        assert lease_granting.blocks_to_give(world.state, world.state.main, world.now) == max(0, 4 - number)
        if number < 4:
            world.lease(key)
    with pytest.raises(Wait, match="enough groups are in flight"):
        world.lease(WORKERS[-1])
    world.do(ReturnLeases(WORKERS[0], ("0",), world.now))
    assert lease_granting.blocks_to_give(world.state, world.state.main, world.now) == 1
    world.do(Admin("pause", AdminRequest(), world.now))
    assert lease_granting.blocks_to_give(world.state, world.state.main, world.now) == 0

"""Counts that are kept from event to event equal counts made anew, and are not part of a state."""

import random
import sys

import pytest

from shoal.ledger import batch_selection, lease_granting
from shoal.ledger.commands import Admin, ReturnLeases, Tick
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.log.writer import checked_entry
from shoal.ledger.registry import apply
from shoal.ledger.state import State, state_hash
from tests.ledger.ledger_fixture import World

OF_A_STREAM = (batch_selection.supply, batch_selection.in_flight, batch_selection.groups_wanted)
OF_A_RUN = (lease_granting._workers, lease_granting._num_good_workers)
WORKERS = tuple(letter * 64 for letter in "abcdef")


def a_random_run(tmp_path, seed, moves=400):
    """A run with every kind of event that changes who has which blocks."""
    rng = random.Random(seed)
    world = World(tmp_path, steps=200, batch_groups=rng.choice([4, 6]), worker_share=0.5)
    for key in WORKERS:
        world.enter(key)
    world.publish()
    for _ in range(moves):
        key, pending = rng.choice(WORKERS), world.state.pending
        move = rng.random()
        try:
            if move < 0.35:
                world.lease(key, holding=[lease.id for lease in world.state.open_leases_of(key)])
            elif move < 0.6 and world.state.open_leases:
                lease = world.state.leases[rng.choice(world.state.open_leases)]
                world.submit(lease.worker, lease)
            elif move < 0.85 and pending:
                rewards = rng.choice([(0.0, 1.0, 0.0, 1.0), (1.0,) * 4])
                world.judge(rng.choice(pending), rng.choice([*["accept"] * 7, "hard"]), rewards=rewards)
            elif move < 0.9:
                world.do(ReturnLeases(key, tuple(lease.id for lease in world.state.open_leases_of(key)), world.now))
            elif move < 0.92:
                world.do(Admin(rng.choice(["pause", "resume"]), "", world.now))
            else:
                world.publish()
        except (Wait, Refused):
            pass
        world.now += rng.choice([*[0.0, 0.5] * 6, 11.0])
        world.do(Tick(world.now))
    return world


@pytest.mark.parametrize("seed", range(4))
def test_kept_counts_equal_fresh_counts_after_every_event_of_a_log(tmp_path, seed):
    world, state = a_random_run(tmp_path, seed), State()
    for data, stored_hash in world.book.store.read():
        apply(state, checked_entry(state, data, stored_hash))
        if state.main.version < 0:
            continue
        for count, of in [*((count, (state.main,)) for count in OF_A_STREAM), *((count, ()) for count in OF_A_RUN)]:
            assert count(state, *of) == count.__wrapped__(state, *of) == count(state, *of), (state.seq, count.__name__)
    assert state.main.version > 1 and len(state.leases) > 20 and state.refused
    assert batch_selection.groups_in_flight(state, state.main) == batch_selection.groups_in_flight(
        world.state, world.state.main
    )


def test_kept_counts_are_no_part_of_a_state(tmp_path):
    world = a_random_run(tmp_path, 0)
    bare = world.audit().state
    bare.__dict__.clear()
    assert world.state.__dict__ and state_hash(world.state) == state_hash(bare) and world.state == bare


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
    world.do(Admin("pause", "", world.now))
    assert lease_granting.blocks_to_give(world.state, world.state.main, world.now) == 0

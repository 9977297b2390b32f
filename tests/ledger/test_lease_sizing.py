"""Deadlines and sizes of leases follow from the time that a worker took before, and newcomers share a part of a run."""

import pytest

from shoal.ledger.commands import AskLease
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Wait
from shoal.ledger.lease_sizing import usual_pace_s
from tests.ledger.ledger_fixture import World, started
from tests.ledger.test_reassign import ask

A, B = "a" * 64, "b" * 64
LEASE_S = 120.0


def world_of(tmp_path, pace_s, blocks=1, key=A, law=LAW):
    """A run of large batches in which a worker has filled some blocks, each in `pace_s`."""
    world = started(tmp_path, key, steps=200, lease_s=LEASE_S, batch_groups=64, law=law)
    fill(world, key, pace_s, blocks)
    return world


def fill(world, key, pace_s, blocks):
    for _ in range(blocks):
        lease = world.lease(key)
        world.now += pace_s
        world.judge(world.submit(key, lease))


def boast(world, key, holding=()):
    """The lease of a worker that claims to be the fastest there is."""
    world.do(AskLease(key, holding, 1e9, world.now))
    return next(lease for lease in world.state.open_leases_of(key) if lease.id not in holding)


def test_a_worker_that_claims_to_be_fast_holds_no_more_than_it_has_shown(tmp_path):
    """The first accepted key claims any speed, and would hold all blocks for their deadlines together."""
    world = world_of(tmp_path, 10.0)
    lease = boast(world, A)
    assert (len(lease.blocks), lease.deadline - world.now) == (2, LEASE_S)
    assert world.audit().findings == []


def test_a_lease_of_many_blocks_lasts_as_long_as_they_should_take_and_lease_s_at_least(tmp_path):
    world = world_of(tmp_path, 2.0)
    lease = boast(world, A)
    assert len(lease.blocks) == LAW.lease_target_s / 2.0 and lease.deadline == world.now + LEASE_S
    assert lease.soft == world.now + LAW.soft_times * LAW.lease_target_s


def test_a_slow_worker_has_no_less_time_for_a_block_than_lease_s(tmp_path):
    world = world_of(tmp_path, 100.0)
    lease = world.lease(A)
    assert lease.deadline == lease.soft == world.now + LEASE_S


def test_a_newcomer_has_lease_s_for_a_block_and_the_usual_time_twice_for_itself(tmp_path):
    world = world_of(tmp_path, 10.0)
    world.enter(B)
    lease = world.lease(B)
    assert usual_pace_s(world.state) == 10.0
    assert (lease.soft - world.now, lease.deadline - world.now) == (20.0, LEASE_S)


def test_a_worker_that_takes_clearly_longer_than_usual_holds_one_lease_at_a_time(tmp_path):
    world = world_of(tmp_path, 10.0)
    for key, pace_s in ((B, 25.0), ("c" * 64, 10.0)):
        world.enter(key)
        fill(world, key, pace_s, 1)
    first = world.lease(B)
    with pytest.raises(Wait, match="you hold 1 lease,"):
        world.lease(B, [first.id])
    usual = world.lease(A)
    assert world.lease(A, [usual.id]).id != usual.id


def test_a_newcomer_of_a_quarter_of_the_usual_speed_loses_its_first_block_and_has_time_for_its_next(tmp_path):
    world = world_of(tmp_path, 10.0, blocks=LAW.probation_blocks)
    world.enter(B)
    first = world.lease(B)
    world.tick(20.1)
    fill(world, A, 10.0, 1)
    assert first.status == "overtaken" and world.state.members[B].pace_s == pytest.approx(30.1)
    second = world.lease(B)
    assert second.soft - world.now > 4 * 10.0 * 1.3
    world.now += 52.0
    world.judge(world.submit(B, second))
    assert world.state.members[B].accepted == 2 and world.state.members[B].lapsed == 0
    assert world.audit().findings == []


def test_newcomers_hold_a_bounded_share_of_the_blocks_in_flight_and_always_one(tmp_path):
    world = world_of(tmp_path, 10.0)
    strangers = [f"{i:064x}" for i in range(20)]
    for key in strangers:
        world.enter(key)
    assert sum(ask(world, key) is not None for key in strangers) == 1
    for i in range(20):
        key = f"{i + 100:064x}"
        world.enter(key)
        world.state.members[key].accepted = 2
        world.lease(key)
    held = 1 + sum(ask(world, key) is not None for key in strangers[1:])
    assert held == 2 and held <= LAW.stranger_share * (20 + held) < held + 1


def test_newcomers_alone_are_not_bounded(tmp_path):
    world = World(tmp_path, steps=200, batch_groups=64)
    world.publish()
    for i in range(20):
        world.enter(f"{i:064x}")
        assert ask(world, f"{i:064x}") is not None

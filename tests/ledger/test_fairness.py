"""Leases that only a favourite gets show as a figure; honest runs have none, and nobody is accused who is merely slow."""

import pytest

from shoal.ledger.facts.members import Leave
from shoal.ledger.facts.run import Admin, Tick
from shoal.ledger.log.verify import report
from tests.ledger.world import World

FRIEND, *OTHERS = (letter * 64 for letter in "abcd")


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, batch_groups=400)
    world.publish()
    return world


def serve(world, *keys, every_s=20.0):
    """One lease for each, in this order, in a run in which a lease takes 20 s."""
    for key in keys:
        lease = world.lease(key)
        world.now += every_s
        world.judge(world.submit(key, lease))


def joined(world, *keys):
    for key in keys:
        world.enter(key)


def test_leases_that_only_a_favourite_gets_are_out_of_turn(world):
    """Each time, the host answers its friend 20 times before one of the others."""
    joined(world, FRIEND, *OTHERS)
    for other in OTHERS * 3:
        serve(world, *[FRIEND] * 20, other)
    audit = world.audit()
    assert audit.findings == [], "no rule is broken"
    turns = audit.turns
    assert turns.leases == 189 and turns.out_of_turn > 100
    assert set(turns.favoured) == {FRIEND} and set(turns.passed_over) == set(OTHERS)
    said = report(audit)
    assert f"leases: 189 granted, {turns.out_of_turn} of them out of turn" in said
    assert f"given to: aaaaaa (aaaaaaaaaaaa) {turns.out_of_turn}" in said and "This is not proof" in said


def test_workers_that_are_served_in_turn_have_no_lease_out_of_turn(world):
    joined(world, FRIEND, *OTHERS)
    serve(world, *[FRIEND, *OTHERS] * 20, every_s=300.0)
    audit = world.audit()
    assert (audit.turns.leases, audit.turns.out_of_turn) == (80, 0)
    assert "leases: 80 granted, 0 of them out of turn\n" in report(audit) and "no proof" not in report(audit)


def test_a_fast_worker_beside_a_slow_one_takes_nobodys_turn(tmp_path):
    """The slow one holds its lease, so it does not wait, and it asks within a minute after its submission."""
    world = World(tmp_path, batch_groups=400, lease_s=2000.0)
    world.publish()
    joined(world, FRIEND, *OTHERS[:1])
    for _ in range(5):
        slow = world.lease(OTHERS[0])
        serve(world, *[FRIEND] * 30)
        world.judge(world.submit(OTHERS[0], slow))
        serve(world, *[FRIEND] * 2)
    serve(world, OTHERS[0])
    assert (world.audit().turns.leases, world.audit().turns.out_of_turn) == (166, 0)


def test_a_worker_that_left_or_never_comes_back_waits_for_nothing(world):
    joined(world, FRIEND, *OTHERS[:2])
    serve(world, *OTHERS[:2])
    world.do(Leave(OTHERS[0], world.now, int(world.now)))
    serve(world, *[FRIEND] * 20)
    world.enter(OTHERS[0])
    serve(world, OTHERS[0])
    assert world.audit().turns.out_of_turn == 0


def test_a_worker_that_went_without_a_word_and_comes_back_looks_as_if_it_had_waited(world):
    joined(world, FRIEND, *OTHERS[:1])
    serve(world, *OTHERS[:1])
    serve(world, *[FRIEND] * 20)
    assert world.audit().turns.out_of_turn == 0
    serve(world, *OTHERS[:1])
    assert world.audit().turns.out_of_turn == 16


def test_who_is_away_for_more_than_an_hour_did_not_wait(world):
    joined(world, FRIEND, *OTHERS[:1])
    serve(world, *OTHERS[:1])
    world.now += 3600.0
    serve(world, *[FRIEND] * 10)
    assert OTHERS[0] not in world.audit().turns._waiting  # so that no lease after that costs an auditor time
    serve(world, OTHERS[0])
    assert world.audit().turns.out_of_turn == 0


def test_a_quarantined_worker_does_not_wait(tmp_path):
    world = World(tmp_path, batch_groups=400, quarantine_s=600.0)
    world.publish()
    joined(world, FRIEND, *OTHERS[:1])
    world.judge(world.submit(OTHERS[0], world.lease(OTHERS[0])), "hard")
    serve(world, *[FRIEND] * 31)
    world.do(Tick(world.now))
    serve(world, *OTHERS[:1])
    assert world.audit().turns.out_of_turn == 0


def test_a_pause_is_no_wait(world):
    joined(world, FRIEND, *OTHERS[:1])
    serve(world, FRIEND, OTHERS[0])
    world.do(Admin("pause", "", world.now))
    world.now += 600.0
    world.do(Admin("resume", "", world.now))
    serve(world, FRIEND, FRIEND, OTHERS[0])
    assert world.audit().turns.out_of_turn == 0

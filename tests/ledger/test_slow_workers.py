"""Workers that are slow on purpose do not hold up a run; those that are slow because of their machines are paid."""

import pytest

from shoal.ledger.constants import LAW
from shoal.ledger.lease_sizing import RECENT_LEASES, usual_pace_s
from tests.ledger.ledger_fixture import World
from tests.ledger.sim_choosy_workers import SLOW, stage_of
from tests.ledger.test_lease_sizing import LEASE_S, A, B, fill, world_of
from tests.ledger.test_reassign import C, ask
from tests.ledger.test_reassign import world_of as reassign_world


def hours(**scene):
    return stage_of(steps=12, lease_s=600.0, plan=SLOW, **scene).found().hours


@pytest.mark.parametrize(("staleness", "slow", "times"), [(0, 1, 1.4), (0, 16, 2.5), (1, 16, 2.0)], ids=str)
def test_workers_that_are_slow_on_purpose_hardly_hold_up_a_run(staleness, slow, times):
    """Eight honest workers need 10 s for a block, and a lease lasts 600 s. Slow workers send honest work just in time."""
    assert hours(staleness=staleness, choosers=slow) <= times * hours(staleness=staleness, choosers=0)


def test_a_worker_that_nothing_new_can_be_leased_to_makes_what_a_slow_one_holds(tmp_path):
    """Only then: as long as there is other work, a slow worker has the time that it took before."""
    world = reassign_world(tmp_path, proven=(C,))
    world.state.members[C].pace_s = 30.0
    held, made = world.lease(C), 0
    world.tick(1.1 * LAW.patience_times * usual_pace_s(world.state))
    assert world.now < held.soft
    while (lease := world.lease(A)).blocks != held.blocks:
        world.judge(world.submit(A, lease))
        made += 1
    assert made > 1 and ask(world, B) is None
    world.judge(world.submit(A, lease))
    assert held.status == "overtaken" and world.state.members[C].lapsed == 0


def test_neither_many_slow_keys_nor_refused_work_nor_those_that_are_gone_change_the_usual_pace(tmp_path):
    world = world_of(tmp_path, 10.0)
    fill(world, A, 10.0, 3)
    slow = [f"{i:064x}" for i in range(4)]
    for key in slow:
        world.enter(key)
        fill(world, key, 100.0, 1)
        fill(world, A, 10.0, 1)
    assert usual_pace_s(world.state) == 10.0
    world.enter(B)
    fill(world, B, 0.1, 1)
    assert usual_pace_s(world.state) == pytest.approx(0.1)
    lease = world.lease(B)
    world.now += 0.1
    world.judge(world.submit(B, lease), outcome="hard")  # nor does it let others seem slow
    assert usual_pace_s(world.state) == 10.0
    fill(world, slow[0], (RECENT_LEASES + 1) * LEASE_S, 1)
    assert usual_pace_s(world.state) > 100.0


def test_before_anything_is_accepted_there_is_no_usual_pace(tmp_path):
    world = World(tmp_path, steps=200, lease_s=LEASE_S)
    assert usual_pace_s(world.state) == 0.0

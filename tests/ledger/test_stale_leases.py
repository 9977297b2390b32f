"""Leases that outlive their version: they are closed, nobody gets them twice, and only frequent ones cost pay.

The last batch of a version waits for its blocks, so few leases do: those whose block as many workers sent as may have it,
while no validator judges, and those that are open when the run ends.
"""

from itertools import cycle

import pytest

from shoal.ledger.batches import SlotVoid
from shoal.ledger.commands import Admin, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event_types import apply, make_entry
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.log.redecide import redecide
from shoal.protocol.constants import COMPLETIONS
from shoal.protocol.messages import AdminRequest, EnvSpec
from tests.ledger.ledger_fixture import assert_holds, started

SLOW, QUICK, THIRD, FOURTH = WORKERS = tuple(letter * 64 for letter in "abcd")


def world_of(tmp_path, **changes):
    """A run in which each worker has filled a block."""
    world = started(tmp_path, WORKERS, **({"steps": 200, "lease_s": 1000.0} | changes))
    for key in WORKERS:
        serve(world, key)
        world.publish_if_due()
    return world


def serve(world, key):
    """Fill a lease in a second."""
    lease = world.lease(key)
    world.now += 1.0
    world.judge(world.submit(key, lease))


def next_version(world, by=QUICK):
    """The other workers fill a batch, and the next version is published."""
    while world.state.main.version not in world.state.main.batches:
        serve(world, by)
    return world.publish()


def outlive(world, *leases):
    """Three others are leased the late blocks, too, and send them, but nobody judges that: the version becomes too old.
    Returns what they sent and the last events."""
    others, late, copies = [key for key in WORKERS if key != leases[0].worker], leases, []
    assert len(others) == LAW.block_workers - 1
    for key in others:
        world.now, newest, late = max(lease.soft for lease in late) + 0.1, late, []
        for _ in leases:
            late.append(world.lease(key, [copy.id for copy in late]))
        assert [(copy.version, copy.blocks) for copy in late] == [(lease.version, lease.blocks) for lease in newest]
        copies += late
    sent = [world.submit(copy.worker, copy) for copy in copies]
    for key in cycle(others):
        serve(world, key)
        if world.state.main.version in world.state.main.batches:
            events = world.publish()
            if leases[0].version < world.state.main.version - world.state.rules.max_staleness:
                return sent, events


def lapses(world, key=SLOW):
    return [
        entry.body.cause
        for entry in world.audit().entries
        if isinstance(entry.body, LeaseLapsed) and world.state.leases[entry.body.lease].worker == key
    ]


def test_a_worker_that_comes_back_does_not_get_a_superseded_lease_again(tmp_path):
    world = world_of(tmp_path)
    lost = world.lease(SLOW)
    outlive(world, lost)
    with pytest.raises(Refused, match="too old"):
        world.submit(SLOW, lost)
    again = world.lease(SLOW)
    assert again.id != lost.id and again.version == world.state.main.version
    world.judge(world.submit(SLOW, again))
    assert world.state.members[SLOW].accepted == 4
    assert_holds(world)


def test_the_slots_of_a_stale_lease_are_void_if_no_other_fills_them(tmp_path):
    world = world_of(tmp_path)
    lost = world.lease(SLOW)
    sent, events = outlive(world, lost)
    assert LeaseLapsed(lost.id, "stale") in [entry.body for entry in events]
    for name in sent:
        events = world.judge(name, "soft")
    first = lost.blocks[0] * world.state.rules.block_groups
    assert events[-1].body == SlotVoid(lost.version, (first, first + 1), "stale")
    assert world.state.open_leases_of(SLOW) == [] and world.state.main.free == []
    assert world.state.main.versions[lost.version].slots[first].status == "void"
    assert_holds(world)


def test_workers_that_are_equally_often_late_pay_nothing(tmp_path):
    """They sleep in turn and lose a lease each time: more than the margin, but as often as the whole run."""
    world = world_of(tmp_path, batch_groups=2)
    for turn in range(40):
        outlive(world, world.lease(WORKERS[turn % len(WORKERS)]))
    for node in (world.state.members[key] for key in WORKERS):
        assert node.stale == 10 > 1 + LAW.stale_margin * node.leases
        assert (node.lapsed, node.dropped, node.credits) == (0, 0, node.accepted * 10)
    assert_holds(world)


def hold(world, times):
    """One worker takes leases and lets all of them go stale, and the others fill their own."""
    for _ in range(times):
        while True:
            try:
                lease = world.lease(SLOW)
                break
            except Wait:
                world.now += 1.0
        outlive(world, lease)
        world.tick(1.0)


def test_a_worker_whose_leases_go_stale_more_often_than_others_pays_as_for_lapses(tmp_path):
    world = world_of(tmp_path, lease_s=100.0)
    for _ in range(10):
        serve(world, SLOW)
        next_version(world)
    paid = world.state.members[SLOW].credits
    hold(world, 10)
    node = world.state.members[SLOW]
    assert lapses(world).count("held") >= 5 and node.lapsed == lapses(world).count("held")
    assert node.stale <= 1 + node.leases * (2 * LAW.stale_margin), "what it pays for does not raise the run's share"
    assert node.credits < paid and node.dropped == node.lapsed
    assert world.state.members[QUICK].credits == world.state.members[QUICK].accepted * 10
    assert_holds(world)


def test_a_lease_that_is_open_at_the_end_of_a_run_costs_nothing(tmp_path):
    """A worker has two leases, but the last batches have room for only one."""
    world = world_of(tmp_path, steps=4, max_staleness=2, worker_share=0.5)
    first = world.lease(SLOW)
    surplus = world.lease(SLOW, [first.id])
    serve(world, THIRD)
    next_version(world)
    world.judge(world.submit(SLOW, first))
    next_version(world)
    assert world.state.phase == "ended" and world.state.leases[surplus.id].status == "stale"
    world.tick(5000.0)
    node = world.state.members[SLOW]
    assert (node.stale, node.lapsed, node.dropped) == (1, 0, 0) and node.vested == node.credits == 40
    assert_holds(world)


@pytest.mark.parametrize("cause", ["stale", "held", "overtaken"])
def test_an_invented_stale_lease_is_found(tmp_path, cause):
    world = world_of(tmp_path)
    lease = world.lease(SLOW)
    entries = world.audit().entries
    forged = make_entry(len(entries), world.now, LeaseLapsed(lease.id, cause), entries[-1].hash)
    apply(world.state, forged)
    assert any("follows from nothing" in finding for finding in redecide([*entries, forged], {}))


def hung_world(tmp_path, kind=COMPLETIONS):
    """A run whose environments the host plays, with pay of both workers that may be lost."""
    world = world_of(tmp_path, lease_s=10.0, envs=[EnvSpec("sums", "d" * 64, 10, 1.0, {}, kind=kind)])
    for _ in range(10):
        world.serve(SLOW)
        next_version(world)
    return world


def let_hang(world, key=SLOW):
    """A lease reaches its deadline; returns the causes of what then ends."""
    lease = world.lease(key)
    world.now = lease.deadline + 1.0
    events = world.do(Tick(world.now, host_hung=(lease.id,)))
    world.now += LAW.max_lapse_wait_s
    return [entry.body.cause for entry in events if isinstance(entry.body, LeaseLapsed)]


def test_a_lease_of_whose_time_the_stage_took_half_costs_nothing_and_the_log_says_so(tmp_path):
    world = hung_world(tmp_path)
    paid = world.state.members[SLOW].credits
    assert let_hang(world) == ["host_hung"]
    node = world.state.members[SLOW]
    assert (node.stale, node.lapsed, node.dropped, node.unfilled, node.credits) == (1, 0, 0, 0, paid)
    idle = world.lease(SLOW)
    world.now = idle.deadline + 1.0
    world.do(Tick(world.now))
    assert (node.stale, node.lapsed, node.dropped) == (1, 1, 1), "its own fault counts"
    assert_holds(world)
    world.now += LAW.max_lapse_wait_s
    lease = world.lease(SLOW)
    entries = world.audit().entries
    for cause in ("host_hung", "host_hung_often"):
        forged = make_entry(len(entries), world.now, LeaseLapsed(lease.id, cause), entries[-1].hash)
        assert redecide([*entries, forged], {}), "not before the deadline"
    (tmp_path / "other").mkdir()
    elsewhere = hung_world(tmp_path / "other", "")
    assert let_hang(elsewhere) == ["deadline"], "where workers play, the host cannot know"


def test_a_worker_on_which_the_stage_hangs_more_often_than_on_others_pays_as_for_lapses(tmp_path):
    world = hung_world(tmp_path)
    paid = world.state.members[SLOW].credits
    causes = []
    for _ in range(10):
        causes += let_hang(world)
        next_version(world)
    node = world.state.members[SLOW]
    assert (
        causes[0] == "host_hung"
        and causes.count("host_hung_often") >= 2
        and node.lapsed == causes.count("host_hung_often")
    )
    assert node.credits < paid
    assert_holds(world)


def test_the_only_worker_pays_for_no_lease_however_often_the_stage_hangs(tmp_path):
    world = started(
        tmp_path, SLOW, lease_s=10.0, steps=99, envs=[EnvSpec("sums", "d" * 64, 10, 1.0, {}, kind=COMPLETIONS)]
    )
    assert [cause for _ in range(6) for cause in let_hang(world)] == ["host_hung"] * 6
    assert_holds(world)


def test_a_draining_run_does_not_wait_for_a_lease_that_is_too_old(tmp_path):
    world = world_of(tmp_path)
    lost = world.lease(SLOW)
    sent, _ = outlive(world, lost)
    for name in sent:
        world.judge(name)
    while world.state.main.version not in world.state.main.batches:
        serve(world, QUICK)
    world.do(Admin("drain", AdminRequest(), world.now))
    world.publish()
    assert world.state.phase == "ended" and lost.status == "stale"
    assert_holds(world)

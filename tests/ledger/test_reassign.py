"""Blocks that are late, dropped or in the way of a batch go to another worker; whose work is accepted first is paid."""

import pytest

from shoal.ledger.batch_selection import blocks_in_the_way, groups_in_flight
from shoal.ledger.batches import SlotVoid
from shoal.ledger.commands import Admin, AskLease, ReturnLeases
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.lease_sizing import reliable
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.pay import Forfeited
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.state_records import StopsRecord
from shoal.protocol.messages import AdminRequest
from tests.ledger.ledger_fixture import VALIDATOR, assert_holds, started

A, B, C, D, E, STRANGER, OTHER = (letter * 64 for letter in "abcde78")
JUDGES = (VALIDATOR, "w" * 64, "x" * 64)


def world_of(tmp_path, good=(A, B), proven=(), strangers=(), **changes):
    """A run in which some workers have a good record, some have one accepted block, and some have none."""
    world = started(
        tmp_path, (*good, *proven, *strangers), **({"steps": 200, "lease_s": 100.0, "batch_groups": 8} | changes)
    )
    for _ in range(LAW.probation_blocks):
        for key in good:
            work(world, key)
    for key in proven:
        work(world, key)
    while world.state.main.version not in world.state.main.batches:
        work(world, good[0])
    world.publish()
    assert reliable(world.state) == set(good)
    return world


def work(world, key):
    """Fill a lease in a second."""
    world.publish_if_due()
    lease = world.lease(key)
    world.now += 1.0
    world.judge(world.submit(key, lease))
    return lease


def give_back(world, key, lease):
    world.do(ReturnLeases(key, (lease.id,), world.now))


def ask(world, key, holding=()):
    """What a worker is leased, or None."""
    try:
        return world.lease(key, holding)
    except Wait:
        return None


def block_of(world, lease):
    return world.state.main.versions[lease.version].blocks[lease.blocks[0]]


def shared_block(tmp_path, **changes):
    """A block that two workers hold."""
    world = world_of(tmp_path, **changes)
    first = world.lease(A)
    world.tick(LAW.least_soft_s + 0.1)
    second = world.lease(B)
    assert (second.version, second.blocks) == (first.version, first.blocks) and first.status == second.status == "open"
    return world, first, second


# --- two holders ---


def test_before_its_soft_time_nobody_else_gets_a_block(tmp_path):
    world = world_of(tmp_path)
    first = world.lease(A)
    assert first.soft == world.now + LAW.least_soft_s < first.deadline
    world.tick(LAW.least_soft_s - 0.1)
    assert world.lease(B).blocks != first.blocks


def test_of_two_holders_the_quicker_is_paid_and_the_other_loses_nothing(tmp_path):
    world, first, second = shared_block(tmp_path)
    assert groups_in_flight(world.state, world.state.main) == 2
    before = (world.state.members[A].credits, world.state.members[A].lapsed, world.state.members[A].refused)
    paid = world.state.members[B].credits
    world.judge(world.submit(B, second))
    assert first.status == "overtaken" and world.state.open_leases == []
    with pytest.raises(Refused, match="another worker was quicker: this costs you nothing"):
        world.submit(A, first)
    node = world.state.members[A]
    assert (node.credits, node.lapsed, node.refused) == before and node.standing == "good"
    assert world.state.members[B].credits == paid + 20 and node.unfilled == 1, "somebody had to make it in its place"
    assert_holds(world)


def test_the_first_holder_is_paid_if_it_is_quicker_and_the_second_is_not_late(tmp_path):
    world, first, second = shared_block(tmp_path)
    paid = world.state.members[A].credits
    world.judge(world.submit(A, first))
    assert second.status == "overtaken" and world.state.members[B].unfilled == 0
    assert world.state.members[A].credits == paid + 20
    assert_holds(world)


@pytest.mark.parametrize("quicker", [A, B])
def test_a_copy_that_is_judged_too_brings_neither_pay_nor_standing_nor_blame(tmp_path, quicker):
    world, first, second = shared_block(tmp_path)
    names = {A: world.submit(A, first), B: world.submit(B, second)}
    slower = B if quicker == A else A
    before = world.state.members[slower]
    before = (before.credits, before.accepted, before.valid_blocks, before.refused, before.unfilled, before.standing)
    world.judge(names[quicker])
    world.judge(names[slower])
    node = world.state.members[slower]
    assert (node.credits, node.accepted, node.valid_blocks, node.refused, node.unfilled, node.standing) == before
    assert block_of(world, first).status == "done" and world.state.pending == []
    assert_holds(world)


def test_a_refused_copy_frees_no_block_that_another_has_filled(tmp_path):
    world, first, second = shared_block(tmp_path)
    names = world.submit(A, first), world.submit(B, second)
    world.judge(names[1])
    world.judge(names[0], "hard")
    assert block_of(world, first).status == "done" and world.state.main.free == []
    assert world.state.members[A].refused == 2
    assert_holds(world)


@pytest.mark.parametrize("refused", [False, True])
def test_a_lapse_of_one_holder_leaves_the_block_to_the_other(tmp_path, refused):
    world, first, second = shared_block(tmp_path)
    paid = world.state.members[B].credits
    if refused:
        world.judge(world.submit(A, first), "hard")
    else:
        give_back(world, A, first)
    assert block_of(world, first).status == "leased" and world.state.main.free == []
    world.judge(world.submit(B, second))
    assert world.state.members[A].lapsed == (not refused) and world.state.members[B].credits == paid + 20
    assert_holds(world)


def test_of_a_lease_of_two_blocks_one_of_which_another_filled_the_other_is_paid(tmp_path):
    world = world_of(tmp_path, batch_groups=16)
    world.do(AskLease(A, (), 1e9, world.now))
    (first,) = world.state.open_leases_of(A)
    world.tick(2 * LAW.soft_times * len(first.blocks))
    second = world.lease(B)
    assert len(first.blocks) > 1 and second.blocks == first.blocks[:1]
    world.judge(world.submit(B, second))
    paid, trust = world.state.members[A].credits, world.state.members[A].valid_blocks
    name = world.submit(A, first)
    assert block_of(world, second).status == "done"
    world.judge(name)
    node = world.state.members[A]
    assert (node.credits - paid, node.valid_blocks - trust) == (20 * (len(first.blocks) - 1), len(first.blocks) - 1)
    assert_holds(world)


# --- who gets a block that was leased before ---


def test_a_dropped_block_goes_at_once_and_before_new_ones_to_workers_with_a_good_record(tmp_path):
    world = world_of(tmp_path, proven=(C,), strangers=(STRANGER,))
    lost = world.lease(STRANGER)
    give_back(world, STRANGER, lost)
    assert world.lease(C).blocks != lost.blocks, "one accepted block is no record"
    assert world.lease(A).blocks == lost.blocks
    assert_holds(world)


def test_nobody_is_leased_a_block_twice_before_others_had_the_time_to_take_it(tmp_path):
    world = world_of(tmp_path)
    lost = world.lease(A)
    give_back(world, A, lost)
    world.tick(99.0)
    assert work(world, A).blocks != lost.blocks
    assert world.lease(A).blocks == lost.blocks
    assert_holds(world)


def test_without_a_worker_of_good_record_a_proven_one_comes_before_strangers(tmp_path):
    world = started(tmp_path, (C, STRANGER, OTHER), steps=200, lease_s=100.0, batch_groups=8)
    work(world, C)
    lost = world.lease(STRANGER)
    give_back(world, STRANGER, lost)
    assert world.lease(OTHER).blocks != lost.blocks
    assert world.lease(C).blocks == lost.blocks


def test_a_worker_that_left_too_many_blocks_to_others_gets_no_dropped_one(tmp_path):
    world = world_of(tmp_path, strangers=(STRANGER,))
    for _ in range(3):
        lease = world.lease(A)
        give_back(world, A, lease)
        work(world, B)
        world.tick(200.0)
    assert reliable(world.state) == {B}
    lost = world.lease(STRANGER)
    give_back(world, STRANGER, lost)
    assert world.lease(A).blocks != lost.blocks and world.lease(B).blocks == lost.blocks


def test_four_workers_hold_one_block_at_most_and_then_its_slots_are_void(tmp_path):
    world = world_of(tmp_path, good=(A, B, C, D, E))
    held = []
    for key in (A, B, C, D, E):
        held.append(world.lease(key))
        world.tick(LAW.least_soft_s + 0.1)
    assert len({lease.blocks for lease in held[:4]}) == 1 and held[4].blocks != held[0].blocks
    for key, lease in zip((A, B, C), held, strict=False):
        give_back(world, key, lease)
    events = [entry.body for entry in world.do(ReturnLeases(D, (held[3].id,), world.now))]
    first = held[0].blocks[0] * world.state.rules.block_groups
    assert SlotVoid(held[0].version, (first, first + 1), "dropped") in events
    assert_holds(world)


def test_at_staleness_0_no_block_is_void_however_often_it_is_dropped(tmp_path):
    world = world_of(tmp_path, good=(A, B, C, D, E), max_staleness=0)
    lost = None
    for key in (A, B, C, D):
        lease = world.lease(key)
        lost = lost or lease
        assert lease.blocks == lost.blocks
        give_back(world, key, lease)
    assert world.lease(E).blocks == lost.blocks
    assert_holds(world)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_block_that_an_environment_stopped_on_four_workers_is_void(tmp_path, max_staleness):
    """And at staleness 0, on each that has a good record: a few that agree would choose what is learned."""
    world = world_of(tmp_path, good=(A, B, C, D, E), max_staleness=max_staleness)
    world.enter(OTHER)  # it has made nothing
    lost, events = None, []
    for key in (A, B, C, D, *([] if max_staleness else [E])):
        assert not any(isinstance(event, SlotVoid) for event in events)
        lease = world.lease(key)
        lost = lost or lease
        assert lease.blocks == lost.blocks
        events = [entry.body for entry in world.do(ReturnLeases(key, (lease.id,), world.now, lease.blocks[0]))]
        assert LeaseLapsed(lease.id, "stopped", lease.blocks[0]) in events and world.state.members[key].lapsed == 1, (
            "at its cost"
        )
    first = lost.blocks[0] * world.state.rules.block_groups
    assert SlotVoid(lost.version, (first, first + 1), "stopped") in events
    assert world.lease(A if max_staleness == 0 else E).blocks != lost.blocks
    assert_holds(world)


def stop(world, key, lease, block=None):
    block = lease.blocks[0] if block is None else block
    made = world.do(ReturnLeases(key, (lease.id,), world.now, block, "task 3 of words"))
    return [entry.body for entry in made]


def test_one_worker_makes_no_block_void_at_staleness_0_and_the_run_waits_for_its_host(tmp_path):
    """It would choose what is learned."""
    world, events = world_of(tmp_path, good=(A,), max_staleness=0, worker_share=1.0), []
    for times in range(4):
        assert world.state.phase == "running" and times < 4
        events += stop(world, A, world.lease(A))
        world.tick(LAW.least_soft_s + 0.1)
    assert not any(isinstance(event, SlotVoid) for event in events) and world.state.phase == "paused"
    assert world.state.pause_cause == (
        "environment faults: a call took too long, or ended its process, each of 4 times, in task 3 of words, and no other "
        "worker is there to play it"
    )
    world.do(Admin("resume", AdminRequest(), world.now))
    work(world, A)
    assert world.state.phase == "running"
    assert_holds(world)


def test_a_block_that_was_stopped_on_all_workers_waits_for_nobody(tmp_path):
    """Two workers have stopped it: either gets it again soon, and after four times it is void. Before that, nobody does."""
    world, events = world_of(tmp_path, good=(A, B), worker_share=1.0), []
    give_back(world, A, world.lease(A))  # its next lapse is the second in a row
    work(world, B)
    began, lost = world.now, world.lease(A)
    events += stop(world, A, lost)
    for key in (B, A, B):
        world.tick(LAW.least_soft_s + 0.1)
        lease = world.lease(key)
        assert lease.blocks == lost.blocks
        events += stop(world, key, lease)
    assert [event.cause for event in events if isinstance(event, SlotVoid)] == ["stopped"]
    assert world.now - began < 4 * LAW.least_soft_s < world.state.rules.lease_s
    world.tick(LAW.least_soft_s + 0.1)
    for key in (A, B):
        assert world.state.members[key].dropped > 1 and world.lease(key).blocks != lost.blocks, "nor then"
    give_back(world, B, world.state.open_leases_of(B)[0])
    world.tick(LAW.least_soft_s + 0.1)
    with pytest.raises(Wait, match="lapsed in a row"):  # of another block
        world.do(AskLease(B, (), 100.0, world.now))
    assert_holds(world)


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("idle", [(B,), (B, C)])
def test_idle_workers_do_not_keep_a_block_that_was_stopped_on_another(tmp_path, idle, reports):
    """They ask each second before it, send nothing, and perhaps report a stop just before each deadline."""
    world = world_of(tmp_path, good=(A, *idle), max_staleness=0, worker_share=1.0)
    began, lost, stopped = world.now, world.lease(A), 0
    stop(world, A, lost)
    while block_of(world, lost).status != "done":
        assert world.now < began + 16 * world.state.rules.lease_s, "their waits grow, as after any lapses"
        world.tick(1.0)
        for key in idle:
            mine = world.state.open_leases_of(key)
            if reports and mine and world.now + 2.0 > mine[0].deadline:
                stopped += len(stop(world, key, mine[0])) > 0
                mine = []
            ask(world, key, [lease.id for lease in mine])
        if lease := ask(world, A):
            world.judge(world.submit(A, lease))
    assert bool(stopped) == reports
    assert_holds(world)


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("probation_is_over", [True, False])
def test_at_staleness_0_a_block_that_four_workers_stopped_is_left_to_the_fifth(tmp_path, probation_is_over, comes):
    world = world_of(tmp_path, good=(A, B, C, D, E), max_staleness=0)
    for key in (A, B, C, D, E):
        world.state.members[key].valid_blocks *= probation_is_over
    lost = [world.lease(A)]
    events = stop(world, A, lost[0])
    for key in (B, C, D):
        lost.append(world.lease(key))
        events += stop(world, key, lost[-1])
    assert len({lease.blocks for lease in lost}) == 1
    world.tick(world.state.rules.lease_s)
    lost.append(world.lease(A))
    busy = world.lease(E) if comes else None
    events += stop(world, A, lost[-1])
    assert not any(isinstance(event, SlotVoid) for event in events) and lost[-1].blocks == lost[0].blocks
    assert [event.phase for event in events if isinstance(event, RulesChanged)] == ([] if comes else ["paused"])
    if busy:
        world.judge(world.submit(E, busy))
        assert world.lease(E).blocks == lost[0].blocks


@pytest.mark.parametrize("other_works", [True, False])
def test_stops_of_one_worker_pause_no_run_in_which_another_works(tmp_path, other_works):
    world = world_of(tmp_path, good=(A, B), max_staleness=0, worker_share=1.0)
    lease = world.lease(A)
    block_of(world, lease).stopped = StopsRecord([A] * 3)
    if other_works:
        world.lease(B)
    stop(world, A, lease)
    assert world.state.phase == ("running" if other_works else "paused")


def test_of_a_lease_only_the_block_that_was_stopped_counts_as_such(tmp_path):
    world = world_of(tmp_path, good=(A,), max_staleness=0, worker_share=1.0)
    world.do(AskLease(A, (), 1e6, world.now))
    (lease,) = world.state.open_leases_of(A)
    stop(world, A, lease, lease.blocks[1])
    blocks = world.state.main.versions[lease.version].blocks
    assert [number for number in lease.blocks if blocks[number].stopped] == [lease.blocks[1]]
    world.tick(LAW.least_soft_s + 0.1)
    again = world.lease(A)
    assert LeaseLapsed(again.id, "returned") in stop(world, A, again, 10**6), "a block of another lease"
    assert_holds(world)


def test_two_stops_in_a_row_are_two_requests_to_an_auditor(tmp_path):
    world = world_of(tmp_path, good=(A,), worker_share=1.0)
    while world.state.members[A].leases < 1 / LAW.free_lapses:
        work(world, A)  # so that a second lapse costs nothing, and no event is between the two
    first = world.lease(A)
    second = world.lease(A, [first.id])
    made = [*stop(world, A, first), *stop(world, A, second)]
    assert [(body.lease, body.block) for body in made] == [(one.id, one.blocks[0]) for one in (first, second)]
    assert_holds(world)


@pytest.mark.parametrize("good", [(A,), (A, B)])
def test_the_only_worker_never_waits_long_after_its_lapses(tmp_path, good):
    world = world_of(tmp_path, good=good, max_staleness=0, worker_share=1.0)
    for _ in range(3):
        give_back(world, A, world.lease(A))
        world.tick(LAW.least_soft_s + 0.1)
        if len(good) > 1 and world.state.members[A].dropped > 1:
            assert ask(world, A) is None
            break
    else:
        assert good == (A,) and ask(world, A) is not None
    assert_holds(world)


# --- the last batch of a version waits ---


def blocked(tmp_path, holder, **changes):
    """A run whose next batch waits for one block that a worker holds."""
    world = world_of(tmp_path, **({"strangers": (STRANGER,)} | changes))
    held = world.lease(holder)
    for _ in range(40):
        if blocks_in_the_way(world.state, world.state.main):
            return world, held
        worker = B if holder == A else A
        world.publish_if_due()
        world.judge(world.submit(worker, world.lease(worker)))
    raise AssertionError("the batch does not wait")


def test_the_last_batch_of_a_version_waits_for_its_blocks(tmp_path):
    world, held = blocked(tmp_path, STRANGER)
    stream = world.state.main
    assert blocks_in_the_way(world.state, stream) == [(held.version, held.blocks[0])]
    assert len(stream.pool) >= 8 and len(stream.batches) == held.version + 1
    world.judge(world.submit(STRANGER, held))
    assert (held.version, held.blocks[0] * 2) in stream.batches[held.version + 1]
    assert_holds(world)


def test_a_block_in_the_way_is_taken_from_a_stranger_at_once(tmp_path):
    world, held = blocked(tmp_path, STRANGER)
    again = world.lease(A)
    assert (again.version, again.blocks) == (held.version, held.blocks)
    world.judge(world.submit(A, again))
    assert held.version + 1 in world.state.main.batches and held.status == "overtaken"
    assert world.state.members[STRANGER].unfilled == 0, "it had no time to be late"
    assert_holds(world)


def test_a_batch_waits_a_while_for_a_worker_of_good_record(tmp_path):
    world, held = blocked(tmp_path, A)
    again = ask(world, B)
    assert again is None or again.blocks != held.blocks
    world.tick(LAW.patience_times * 1.0 + 0.1)
    holding = [lease.id for lease in world.state.open_leases_of(B)]
    assert world.lease(B, holding).blocks == held.blocks


@pytest.mark.parametrize("verdict", ["a first refusal", "none in time"])
def test_a_block_in_the_way_that_validators_do_not_settle_is_made_again(tmp_path, verdict):
    world, held = blocked(tmp_path, STRANGER, validators=JUDGES)
    name = world.submit(STRANGER, held, order=JUDGES)
    again = ask(world, A)
    assert again is None or again.blocks != held.blocks
    if verdict == "none in time":
        world.tick(LAW.turn_s + 0.1)
    else:
        world.judge(name, "soft")
    again = world.lease(A, [lease.id for lease in world.state.open_leases_of(A)])
    assert again.blocks == held.blocks
    world.judge(world.submit(A, again))
    assert held.version + 1 in world.state.main.batches and name in world.state.pending
    assert_holds(world)


def test_a_draining_run_does_not_wait_for_a_block_that_nobody_may_make(tmp_path):
    world, held = blocked(tmp_path, STRANGER)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert world.state.phase == "draining" and held.version + 1 not in world.state.main.batches
    give_back(world, STRANGER, held)
    assert held.version + 1 in world.state.main.batches
    assert_holds(world)


def test_a_paused_run_waits_for_a_block_that_was_given_back(tmp_path):
    """Else a worker could wait for a pause and then give back what it does not like: nobody else may make it now."""
    world, held = blocked(tmp_path, STRANGER)
    world.do(Admin("pause", AdminRequest(), world.now))
    give_back(world, STRANGER, held)
    assert held.version + 1 not in world.state.main.batches
    world.do(Admin("resume", AdminRequest(), world.now))
    world.judge(world.submit(A, world.lease(A)))
    assert (held.version, held.blocks[0] * 2) in world.state.main.batches[held.version + 1]
    assert_holds(world)


def test_a_disputed_block_in_the_way_is_given_to_one_worker_at_a_time(tmp_path):
    world, held = blocked(tmp_path, STRANGER, good=(A, B, C, D), validators=JUDGES)
    world.judge(world.submit(STRANGER, held, order=JUDGES), "soft")
    again = [ask(world, key) for key in (A, C, D)]
    assert [lease and lease.blocks == held.blocks and lease.version == held.version for lease in again] == [
        True,
        False,
        False,
    ]
    world.tick(LAW.patience_times * 1.0 + 0.1)
    world.submit(A, again[0], order=JUDGES)
    holding = [lease.id for lease in world.state.open_leases_of(B)]
    other = ask(world, B, holding)
    assert other is None or other.blocks != held.blocks, "what was just sent again is not judged yet"
    assert_holds(world)


def test_a_batch_takes_the_oldest_version_first(tmp_path):
    world = world_of(tmp_path)
    late = world.lease(B)
    for _ in range(4):
        world.judge(world.submit(A, world.lease(A)))
    world.publish()
    for _ in range(4):
        world.judge(world.submit(A, world.lease(A)))
    world.judge(world.submit(B, late))
    step = len(world.state.main.batches) - 1
    assert world.state.main.batches[step][:2] == tuple((late.version, late.blocks[0] * 2 + i) for i in (0, 1))


# --- lapses without pay to lose ---


def lapse(world, key, times):
    for _ in range(times):
        while ask(world, key) is None:
            world.tick(1.0)
        world.tick(101.0)


def test_lapses_without_pay_to_lose_are_owed_once_and_later_pay_settles_them(tmp_path):
    world = started(tmp_path, STRANGER, steps=200, lease_s=100.0)
    lapse(world, STRANGER, 4)
    node, said = world.state.members[STRANGER], [type(entry.body) for entry in world.audit().entries]
    assert (node.lapsed, node.owes) == (4, 2), "it owes one lease, not three"
    assert Forfeited in said
    for _ in range(3):
        while ask(world, STRANGER) is None:
            world.tick(1.0)
        (lease,) = world.state.open_leases_of(STRANGER)
        world.judge(world.submit(STRANGER, lease))
        world.publish_if_due()
    assert node.credits == 40 and node.owes == 0
    assert_holds(world)

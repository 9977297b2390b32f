"""Silent validators, and workers whose leases lapse: a run does not wait long, and honest slow nodes lose nothing."""

import pytest

from shoal.ledger.commands import ReturnLeases
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Wait
from shoal.ledger.state import state_hash
from shoal.ledger.state_records import TurnsRecord
from shoal.ledger.validator_turns import silent
from shoal.ledger.verdict_decisions import to_judge
from tests.ledger.ledger_fixture import World, started

WORKER = "a" * 64
SILENT, QUICK, THIRD = JUDGES = ("d" * 64, "e" * 64, "f" * 64)


@pytest.fixture
def court(tmp_path):
    """A run with three validators and one worker."""
    return started(tmp_path, WORKER, JUDGES, steps=200, max_staleness=50)


def submitted(world, order=JUDGES):
    world.publish_if_due()
    return world.submit(WORKER, world.lease(WORKER), order=order)


def let_pass(world, by=QUICK):
    """The first validator misses its turn, and the second judges instead."""
    name = submitted(world)
    world.now += LAW.turn_s
    world.judge(name, by=by)
    world.now += 1.0


def make_silent(world):
    for _ in range(LAW.missed_turns):
        let_pass(world)
    assert silent(world.state, world.now) == {SILENT}


def test_after_two_missed_turns_a_validator_delays_nobody(court):
    waits = []
    for _ in range(6):
        name, since = submitted(court), court.now
        while name not in to_judge(court.state, QUICK, court.now):
            court.now += 1.0
        waits.append(court.now - since)
        court.judge(name, by=QUICK)
        court.now += 1.0
    assert waits == [LAW.turn_s] * LAW.missed_turns + [0.0] * (6 - LAW.missed_turns)
    assert court.audit().findings == [] and state_hash(court.audit().state) == state_hash(court.state)


def test_submissions_that_wait_already_go_to_the_next_validator_when_the_first_falls_silent(court):
    let_pass(court)
    name, later = submitted(court), submitted(court)
    court.now += LAW.turn_s
    newest = submitted(court)
    assert newest not in to_judge(court.state, QUICK, court.now)
    court.judge(name, by=QUICK)
    assert {later, newest} <= set(to_judge(court.state, QUICK, court.now))


def test_if_all_validators_are_silent_the_order_stays(court):
    for key in JUDGES:
        court.state.members[key].turns = TurnsRecord(missed_at=court.now, counted=LAW.missed_turns)
    name = submitted(court)
    assert [to_judge(court.state, key, court.now) for key in JUDGES] == [[name], [], []]


def test_a_dispute_does_not_wait_for_a_silent_validator_but_takes_its_verdict(court):
    make_silent(court)
    name = submitted(court)
    court.judge(name, "hard", by=QUICK)
    assert {key for key in JUDGES if to_judge(court.state, key, court.now)} == {SILENT, THIRD}


# --- workers that let leases lapse ---

PROVEN, STRANGER, NEWCOMER = "a" * 64, "b" * 64, "c" * 64
LEASE_S = 10.0


@pytest.fixture
def run(tmp_path):
    """A synchronous run with one worker whose work was accepted and two without accepted work."""
    world = started(tmp_path, (PROVEN, STRANGER, NEWCOMER), steps=200, max_staleness=0, lease_s=LEASE_S, batch_groups=8)
    world.serve(PROVEN)
    return world


def drop(world, key, holding=()):
    """A lease that lapses."""
    lease = world.lease(key, holding)
    world.tick(LEASE_S + 1.0)
    return lease


def wait_of(world, key):
    """Seconds until a worker gets a lease."""
    since = world.now
    while world.now <= since + LAW.max_lapse_wait_s:
        try:
            return world.now - since, world.lease(key)
        except Wait:
            world.now += 1.0
    raise AssertionError("it gets none within the longest wait")


def test_the_wait_after_a_lapse_doubles_each_time_up_to_an_hour(tmp_path):
    world = World(tmp_path, steps=200, max_staleness=0, lease_s=LEASE_S)
    world.enter(STRANGER)
    world.enter(WORKER)  # who is alone waits no longer than `least_soft_s`
    world.publish()
    waits = []
    for _ in range(13):
        waits.append(wait_of(world, STRANGER)[0])
        world.tick(LEASE_S + 1.0)
    assert waits[:6] == [0.0, 0.0, 10.0, 20.0, 40.0, 80.0] and waits[-1] == LAW.max_lapse_wait_s
    with pytest.raises(Wait, match="13 of your leases lapsed in a row: the next one comes in 3600 s at most"):
        world.lease(STRANGER)
    assert world.audit().findings == [] and state_hash(world.audit().state) == state_hash(world.state)


def test_a_submission_ends_the_wait_even_if_it_comes_late(tmp_path):
    """An honest slow worker alone in a run: every lease lapses, it fills each one late, and never has to wait."""
    world = started(tmp_path, STRANGER, steps=200, max_staleness=0, lease_s=LEASE_S)
    for _ in range(6):
        world.publish_if_due()
        lease = drop(world, STRANGER)
        world.judge(world.submit(STRANGER, lease))
    node = world.state.members[STRANGER]
    assert (node.lapsed, node.dropped) == (6, 0) and node.accepted == 12 and world.audit().findings == []


def test_leases_given_back_at_the_same_moment_count_as_one_drop(run):
    first = run.lease(PROVEN)
    second = run.lease(PROVEN, [first.id])
    run.do(ReturnLeases(PROVEN, (first.id, second.id), run.now))
    node = run.state.members[PROVEN]
    assert (node.lapsed, node.dropped) == (2, 1)


def test_a_block_that_no_proven_worker_takes_in_time_goes_to_a_newcomer(run):
    lost = drop(run, STRANGER)
    run.now += LEASE_S
    assert run.lease(NEWCOMER).blocks == lost.blocks


@pytest.mark.parametrize("standing", ["kicked", "quarantined"])
def test_no_block_is_kept_for_a_worker_that_gets_no_leases(run, standing):
    lost = drop(run, STRANGER)
    run.state.members[PROVEN].standing = standing
    assert run.lease(NEWCOMER).blocks == lost.blocks


def test_a_dropped_block_is_withheld_from_the_worker_that_dropped_it(run):
    lost = drop(run, PROVEN)
    assert run.lease(PROVEN).blocks != lost.blocks
    assert run.lease(NEWCOMER).blocks == lost.blocks, "not kept for the one that dropped it either"


def test_a_newcomer_holds_one_lease_while_others_have_accepted_work(run):
    first = run.lease(NEWCOMER)
    with pytest.raises(Wait, match="you hold 1 lease,"):
        run.lease(NEWCOMER, [first.id])
    held = run.lease(PROVEN)
    assert run.lease(PROVEN, [held.id]).id != held.id

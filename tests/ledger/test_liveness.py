"""Who keeps a run waiting: validators that fall silent. Nobody waits for them long, and honest slow ones lose nothing."""

import pytest

from shoal.ledger import audits
from shoal.ledger.commands import Refused
from shoal.ledger.judging import to_judge
from shoal.ledger.state import state_hash
from tests.ledger.world import World

WORKER = "a" * 64
SILENT, QUICK, THIRD = JUDGES = ("d" * 64, "e" * 64, "f" * 64)


@pytest.fixture
def court(tmp_path):
    """A run with three validators and one worker."""
    world = World(tmp_path, JUDGES, steps=200, max_staleness=50)
    world.enter(WORKER)
    world.publish()
    return world


def submitted(world, order=JUDGES):
    if world.state.version in world.state.batches:
        world.publish()
    return world.submit(WORKER, world.lease(WORKER), order=order)


def let_pass(world, by=QUICK):
    """A turn that the first lets pass: the second votes in its place."""
    name = submitted(world)
    world.now += audits.TURN_S
    world.judge(name, by=by)
    world.now += 1.0


def make_silent(world):
    for _ in range(audits.MISSED_TURNS):
        let_pass(world)
    assert world.state.silent() == {SILENT}


def test_a_validator_that_lets_its_turns_pass_holds_up_nobody_after_the_second(court):
    waits = []
    for _ in range(6):
        name, since = submitted(court), court.now
        while name not in to_judge(court.state, QUICK, court.now):
            court.now += 1.0
        waits.append(court.now - since)
        court.judge(name, by=QUICK)
        court.now += 1.0
    assert waits == [audits.TURN_S] * audits.MISSED_TURNS + [0.0] * (6 - audits.MISSED_TURNS)
    assert court.audit().findings == [] and state_hash(court.audit().state) == state_hash(court.state)


def test_what_waits_already_is_handed_to_the_next_when_its_first_falls_silent(court):
    let_pass(court)
    name, later = submitted(court), submitted(court)
    court.now += audits.TURN_S
    newest = submitted(court)
    assert newest not in to_judge(court.state, QUICK, court.now)
    court.judge(name, by=QUICK)
    assert {later, newest} <= set(to_judge(court.state, QUICK, court.now))


def test_a_validator_that_comes_back_may_judge_in_its_place_and_one_vote_gives_its_turns_back(court):
    make_silent(court)
    name = submitted(court)
    assert to_judge(court.state, SILENT, court.now) == to_judge(court.state, QUICK, court.now) == [name]
    court.judge(name, by=SILENT)
    assert court.state.silent() == set() and court.state.nodes[SILENT].missed == 0
    with pytest.raises(Refused, match="is for dddddddddddd first"):
        court.judge(submitted(court), by=QUICK)


def test_turns_that_begin_together_are_one_miss_so_that_a_busy_validator_is_not_silent(court):
    """A liar saves up what an honest one has no time for, and votes on all of it at once."""
    names = [submitted(court) for _ in range(5)]
    court.now += audits.TURN_S
    for name in names:
        court.judge(name, by=QUICK)
    assert court.state.nodes[SILENT].missed == 1 and court.state.silent() == set()


def test_a_turn_that_began_before_its_validators_last_vote_is_no_miss(court):
    first, second = submitted(court), submitted(court)
    court.now += audits.TURN_S - 1
    court.judge(first, by=SILENT)
    court.now += 1
    court.judge(second, by=QUICK)
    assert court.state.nodes[SILENT].missed == 0


def test_who_votes_early_or_first_pushes_nobody_back(court):
    for _ in range(4):
        name = submitted(court)
        with pytest.raises(Refused, match="first"):
            court.judge(name, by=QUICK)
        court.judge(name, by=SILENT)
        court.now += audits.TURN_S
    assert [court.state.nodes[key].missed for key in JUDGES] == [0, 0, 0]


def test_with_all_validators_silent_the_order_is_as_before(court):
    for key in JUDGES:
        court.state.nodes[key].missed = audits.MISSED_TURNS
    name = submitted(court)
    assert [to_judge(court.state, key, court.now) for key in JUDGES] == [[name], [], []]


def test_a_dispute_waits_for_no_silent_validator_and_still_hears_it(court):
    make_silent(court)
    name = submitted(court)
    court.judge(name, "hard", by=QUICK)
    assert {key for key in JUDGES if to_judge(court.state, key, court.now)} == {SILENT, THIRD}


def test_a_slow_validator_that_votes_in_the_end_is_at_no_fault(court):
    make_silent(court)
    node = court.state.nodes[SILENT]
    assert node.standing == "new" and node.failures == 0 and SILENT in court.state.judges()

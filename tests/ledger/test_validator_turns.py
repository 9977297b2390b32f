"""Turns, rechecks and validators that take time: what one colluder of three can do while the others are busy, and that an
honest validator that is slow, restarts or dies is at no fault and holds up nobody for long."""

import msgspec
import pytest

from shoal.ledger.commands import Admin, JoinRun, LeaveRun, Submit, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused
from shoal.ledger.state_records import TurnsRecord
from shoal.ledger.validator_turns import absent, overdue_verdicts, silent, slack_s, slow_check, turn_s
from shoal.ledger.verdict_decisions import to_judge
from shoal.protocol.encoding import digest
from shoal.protocol.messages import AdminRequest, Join
from tests.ledger.ledger_fixture import started
from tests.ledger.sim_validators import Colluding, Judging, Lazy, Panel, Rolling, Skipping, Worker, key_of
from tests.nightly import first_of

FRIEND, LIAR = key_of("friend"), key_of("liar")
HOUR_S = 3600.0


def honest(count, check_s=20.0):
    return [Judging(f"honest {i}", check_s) for i in range(count)]


def workers(count, every_s):
    return [Worker(f"worker {i}", every_s) for i in range(count)]


# --- attacks, played on the real rules ---


@pytest.mark.parametrize("kind", [Colluding, Skipping])
def test_a_colluder_gains_nothing_while_the_other_validators_are_busy(kind):
    """Honest checks take 20 s, and more arrives than they can judge. The friend forges all that it sends."""

    judges = [kind("liar"), *honest(2)]
    panel = Panel([Worker("friend", 60.0, forged=1.0), *workers(6, 40.0)], judges).run(2 * HOUR_S)
    assert len(panel.passed) < 6 and panel.counts["forged and refused"] > 8
    assert panel.state.members[FRIEND].credits == 0
    assert len(panel.faults[LIAR]) >= LAW.validator_faults and panel.state.members[LIAR].standing == "suspended"
    assert set(panel.faults) == {LIAR} and panel.decided > 600


@pytest.mark.parametrize("kind", first_of(Skipping, Rolling))
def test_a_validator_that_works_for_its_friend_alone_is_named_and_delays_little(kind):
    """It lets all other turns pass, or takes nearly the whole turn for each."""

    def play(kind, law=LAW):
        judges = [kind("liar", 0.5), *honest(2, 0.5)]
        panel = Panel(
            [Worker("friend", 4.0), *workers(3, 4.0)], judges, law, batch_groups=12, max_staleness=0, train_s=3.0
        )
        return panel.run(0.5 * HOUR_S)

    control = play(Judging).state.main.version
    unskipped = msgspec.structs.replace(LAW, missed_turns=10**6)
    assert play(kind, unskipped).state.main.version < 0.6 * control
    panel = play(kind)
    assert panel.state.main.version > 0.85 * control
    assert panel.accepted[FRIEND] < 0.27 * sum(panel.accepted.values())
    assert panel.state.members[LIAR].turns.missed >= 6 and set(panel.faults) == set()
    assert LIAR in silent(panel.state, panel.now) and LIAR[:12] in absent(panel.state, panel.now)


def test_a_validator_that_accepts_without_looking_is_found_at_once_among_three():
    """From how many submissions its third fault follows."""

    def found(seed):
        panel = Panel(workers(4, 8.0), [Lazy("liar"), *honest(2, 1.0)], seed=seed).run(200.0)
        assert set(panel.faults) <= {LIAR}
        return [*panel.faults.get(LIAR, []), 10_000, 10_000, 10_000][2]

    assert max(found(seed) for seed in range(5)) <= 20


def test_one_of_two_that_did_no_work_stays_without_trust():
    """Nobody can tell which of the two, but the log shows that they differ, and all that either accepts is judged again."""
    panel = Panel(workers(4, 8.0), [Lazy("liar"), *honest(1, 1.0)]).run(600.0)
    assert panel.counts["rechecked: undecided"] > 30 and panel.faults == {}


# --- honest controls ---


@pytest.mark.parametrize(("check_s", "load"), first_of((20.0, 2.0), (5.0, 0.5), (5.0, 2.0), (20.0, 0.5)))
def test_an_honest_slow_validator_is_at_no_fault_and_does_not_hold_up_the_run(check_s, load):
    def play(slowness):
        judges = [Judging("slow", slowness * check_s), *honest(2, check_s)]
        return Panel(workers(6, 2 * check_s / load), judges, batch_groups=24).run(HOUR_S)

    alike, slow = play(1.0), play(4.0)
    node = slow.state.members[key_of("slow")]
    assert slow.faults == {} and node.standing == "new" and slow.counts["rechecked: undecided"] == 0
    assert slow.decided >= (0.95 if load < 1 else 0.7) * alike.decided
    if load < 1:
        assert node.turns.missed <= 5 and key_of("slow") not in silent(slow.state, slow.now)


def test_a_validator_that_restarts_is_at_no_fault_and_comes_back():
    away = ((300.0, 345.0), (1500.0, 1545.0))
    panel = Panel(workers(6, 20.0), [Judging("restarts", 5.0, away), *honest(2, 5.0)], batch_groups=24).run(HOUR_S / 2)
    assert panel.faults == {} and silent(panel.state, panel.now) == set()
    assert panel.state.members[key_of("restarts")].turns.voted > panel.now - 300.0


@pytest.mark.parametrize("since", [0.0, 500.0], ids=["never there", "dies"])
def test_a_dead_validator_delays_few_submissions_and_ends_no_vesting(since):
    panel = Panel(workers(6, 20.0), [Judging("dead", 5.0, ((since, 1e9),)), *honest(2, 5.0)], batch_groups=24)
    panel.run(HOUR_S / 2)
    assert silent(panel.state, panel.now) == {key_of("dead")} and panel.faults == {}
    assert sum(wait > 40.0 for wait in panel.waits) < 10 and max(panel.waits) < 130.0
    assert all(node.vested > 0 for node in panel.state.members.values() if node.role == "worker")


# --- the rules one by one ---

WORKER = "a" * 64
FIRST, SECOND, THIRD = JUDGES = ("d" * 64, "e" * 64, "f" * 64)


@pytest.fixture
def court(tmp_path):
    """A run with three validators and one worker."""
    return court_of(tmp_path)


def court_of(tmp_path, law=LAW, judges=JUDGES, **rules):
    return started(tmp_path, WORKER, judges, law, **({"steps": 200, "max_staleness": 50} | rules))


def submitted(world, order=JUDGES, **how):
    world.publish_if_due()
    return world.submit(WORKER, world.lease(WORKER), order=order, **how)


def turns_of(world, key):
    return world.state.members[key].turns


def test_a_validator_that_works_through_its_queue_keeps_its_turns(tmp_path):
    court = court_of(tmp_path, lease_s=100.0)
    assert turn_s(court.state) == 100.0, "until they are measured, validators get as long as a worker for a block"
    names = [submitted(court) for _ in range(4)]
    for name in names[:3]:
        court.now += 99.0
        assert to_judge(court.state, SECOND, court.now) == []
        court.judge(name, by=FIRST)
    court.now += 100.0
    court.judge(names[3], by=SECOND)
    assert turns_of(court, FIRST).missed == 1 and court.audit().findings == []


def test_what_waited_before_a_validator_joined_is_no_time_of_its_check(tmp_path):
    court = court_of(tmp_path, judges=(FIRST,), lease_s=100.0)
    name = submitted(court, order=())
    court.now += 600.0
    court.do(Admin("admit", AdminRequest(SECOND), court.now))
    court.enter(SECOND, "validator")
    court.now += 2.0
    court.judge(name, by=SECOND)
    assert (turns_of(court, SECOND).check_s, turns_of(court, SECOND).missed) == (2.0, 0)


def test_a_validator_is_silent_from_when_it_joined_or_came_back(tmp_path):
    court = court_of(tmp_path, judges=(FIRST,), lease_s=100.0)
    submitted(court, order=(FIRST,))
    court.do(LeaveRun(FIRST, court.now))
    court.now += 1800.0
    assert f"({FIRST[:12]}) left" in overdue_verdicts(court.state, court.now, 0.0)
    court.do(Admin("admit", AdminRequest(SECOND), court.now))
    join = Join("validator", "again", 0.0, "test", "float32", "cpu")
    court.enter(SECOND, "validator")
    court.do(JoinRun(FIRST, join, court.now, int(court.now)))
    assert overdue_verdicts(court.state, court.now, 0.0) == ""
    court.now += 180.0
    assert [
        overdue_verdicts(court.state, court.now, 0.0).count(text) for text in ("silent for", "silent for 3m00s")
    ] == [2, 2]


def test_a_validator_that_hangs_is_named_from_its_first_missed_turn_where_it_is_waited_for(tmp_path):
    court = court_of(tmp_path, lease_s=600.0)
    for key in (FIRST, SECOND):
        court.now += 1.0
        court.judge(submitted(court, order=(key,)), by=key)
    began, name = court.now - 3600.0, submitted(court, order=(FIRST, SECOND))
    court.now += turn_s(court.state) - 1.0
    assert overdue_verdicts(court.state, court.now, began) == ""
    court.now += 2.0
    assert f"({FIRST[:12]}) silent for 31s" in overdue_verdicts(court.state, court.now, began)
    court.judge(name, by=SECOND)
    name = submitted(court, order=(SECOND, FIRST))
    court.now += 5.0
    assert overdue_verdicts(court.state, court.now, began) == "", "the other's turn has only begun"
    court.judge(name, by=SECOND)
    submitted(court, order=(FIRST, SECOND))
    court.now += 1.0
    assert f"({FIRST[:12]}) silent for 38s" in overdue_verdicts(court.state, court.now, began), "no verdict since"
    assert overdue_verdicts(court.state, court.now, began, {FIRST: court.now - 1.0}) == "", "it has joined again"


def test_two_validators_that_fell_silent_are_both_named_though_one_submission_waits_for_each(tmp_path):
    court = court_of(tmp_path, lease_s=600.0)
    for key in (FIRST, SECOND):
        court.now += 1.0
        court.judge(submitted(court, order=(key,)), by=key)
    began = court.now
    for order in ((FIRST, SECOND), (SECOND, FIRST)):
        court.submit(WORKER, court.lease(WORKER), order=order)
    court.now = began + turn_s(court.state) + 2.0
    told = overdue_verdicts(court.state, court.now, 0.0)
    assert f"({FIRST[:12]}) silent for" in told and f"({SECOND[:12]}) silent for" in told


def test_the_validator_whose_turn_it_is_is_named_once_its_check_takes_longer_than_usual(tmp_path):
    court = court_of(tmp_path, lease_s=600.0)
    for key in JUDGES:
        name = submitted(court, order=(key,))
        court.now += 4.0
        court.judge(name, by=key)
    began, name = court.now, submitted(court, order=(FIRST, SECOND))
    court.now += 3.0
    assert slow_check(court.state, court.now, 0.0) == ""
    court.now += 2.0
    assert slow_check(court.state, court.now, 0.0).endswith(f"({FIRST[:12]}) has the check for 5s")
    assert overdue_verdicts(court.state, court.now, 0.0) == "" and slow_check(court.state, court.now, court.now) == ""
    court.now = began + turn_s(court.state) + 5.0
    assert f"({SECOND[:12]}) has the check for 5s" in slow_check(court.state, court.now, 0.0)
    court.judge(name, by=SECOND)
    assert slow_check(court.state, court.now, 0.0) == "", "nothing waits"


def test_a_verdict_on_a_newer_submission_keeps_no_turn_on_an_older_one(court):
    older, newer = submitted(court), submitted(court)
    court.now += LAW.turn_s - 1
    court.judge(newer, by=FIRST)
    court.now += 1
    court.judge(older, by=SECOND)
    assert turns_of(court, FIRST).missed == 1 and court.audit().findings == []


def test_turns_grow_with_the_checks_of_the_middle_validator(tmp_path):
    court = court_of(tmp_path, lease_s=50.0)
    assert turn_s(court.state) == 50.0
    for key, took_s in zip(JUDGES, (20.0, 25.0, 0.1), strict=True):
        name = submitted(court, order=(key,))
        court.now += took_s
        court.judge(name, by=key)
    assert turn_s(court.state) == pytest.approx(LAW.turn_checks * 20.0)
    name = submitted(court)
    court.now += 99.0
    with pytest.raises(Refused, match="is for dddddddddddd"):
        court.judge(name, by=SECOND)
    court.now += 1.1
    court.judge(name, by=SECOND)
    assert court.audit().findings == []


def test_a_turn_is_never_longer_than_a_dispute(tmp_path):
    court = court_of(tmp_path, lease_s=1e4)
    assert turn_s(court.state) == LAW.dispute_s, "nobody has judged yet, and a worker has hours for a block"


def test_a_late_verdict_counts_as_a_missed_turn(court):
    for key in JUDGES:
        name = submitted(court, order=(key,))
        court.now += 0.2
        court.judge(name, by=key)
    assert slack_s(court.state) == LAW.late_s
    for took_s, missed in ((LAW.late_s, 0), (LAW.late_s + 0.1, 1)):
        name = submitted(court)
        court.now += took_s
        court.judge(name, by=FIRST)
        assert turns_of(court, FIRST).missed == missed


def test_turns_that_pass_together_are_missed_once(court):
    names = [submitted(court) for _ in range(5)]
    court.now += LAW.turn_s
    for name in names:
        court.judge(name, by=SECOND)
    assert turns_of(court, FIRST).missed == 1 and silent(court.state, court.now) == set()


def made_silent(court):
    for _ in range(LAW.missed_turns):
        name = submitted(court)
        court.now += LAW.turn_s
        court.judge(name, by=SECOND)
    assert silent(court.state, court.now) == {FIRST}


def test_verdicts_do_not_shorten_the_time_for_which_missed_turns_count(court):
    made_silent(court)
    until = turns_of(court, FIRST).counts_until
    assert until == court.now + LAW.missed_counts_turns * LAW.turn_s
    while court.now < until - 10.0:
        court.judge(submitted(court), by=FIRST)
        court.now += 10.0
        assert (FIRST in silent(court.state, court.now)) is (court.now < until)
    court.now = until
    assert silent(court.state, court.now) == set() and court.audit().findings == []


def test_a_silent_validator_is_skipped_until_it_sends_a_verdict(court):
    made_silent(court)
    court.now += 1e5
    name = submitted(court)
    assert name in to_judge(court.state, SECOND, court.now)
    court.judge(name, by=FIRST)
    assert silent(court.state, court.now) == set()


@pytest.mark.parametrize("how", ["suspended", "left"])
def test_nobody_waits_for_a_validator_that_judges_no_more(court, how):
    name = submitted(court)
    if how == "left":
        court.do(LeaveRun(FIRST, court.now, int(court.now)))
    else:
        court.state.members[FIRST].standing = "suspended"
    assert to_judge(court.state, SECOND, court.now) == [name]


def test_a_recheck_comes_before_newer_work(court):
    older = submitted(court, recheck=0.0)
    newer = submitted(court, order=(SECOND,))
    court.judge(older, by=FIRST)
    assert to_judge(court.state, SECOND, court.now) == [older, newer]


def test_a_recheck_waits_for_a_validator_at_work_and_nothing_vests_until_then(court):
    for _ in range(LAW.vesting_blocks):
        court.judge(submitted(court), by=FIRST)
    older, newer = submitted(court), submitted(court, recheck=0.0, order=(FIRST, SECOND))
    court.now += 10.0
    court.judge(newer, by=FIRST)
    court.now += 1.0
    court.judge(older, by=FIRST)
    for _ in range(40):  # busy for longer than a dispute may last, with what the others were asked first
        court.state.submissions[newer].judged_at, turns_of(court, SECOND).voted = 1000.0, court.now
        court.now += LAW.turn_s - 1
        assert court.state.rechecks == [newer] and court.do(Tick(court.now)) == []
    assert court.state.members[WORKER].vested == 0


def test_a_recheck_that_all_let_pass_ends_undecided(court):
    name = submitted(court, recheck=0.0)
    court.judge(name, by=FIRST)
    court.now += LAW.dispute_s
    assert [entry.body.outcome for entry in court.do(Tick(court.now))] == ["undecided"]
    assert court.audit().findings == []


def test_no_recheck_is_drawn_if_nobody_is_there_to_make_it(tmp_path):
    court = court_of(tmp_path, judges=JUDGES[:2])
    turns_of(court, FIRST).counted, turns_of(court, FIRST).missed_at = LAW.missed_turns, court.now
    court.judge(submitted(court, order=JUDGES[:2], recheck=0.0), by=SECOND)
    assert court.state.rechecks == []


def test_a_validator_with_n_confirmed_verdicts_is_rechecked_with_chance_one_in_n_plus_one(court):
    assert [LAW.recheck_chance(n) for n in (0, 1, 3, 19, 1000)] == [1.0, 0.5, 0.25, 0.05, 0.05]
    for confirmed, draw, rechecked in ((0, 0.99, True), (1, 0.51, False), (1, 0.49, True), (2, 0.3, True)):
        assert turns_of(court, FIRST).confirmed == confirmed
        name = submitted(court, recheck=draw)
        court.judge(name, by=FIRST)
        assert (name in court.state.rechecks) is rechecked
        if rechecked:
            court.judge(name, by=SECOND)
    assert court.audit().findings == []


def test_a_confirmation_without_audits_or_with_an_accusation_is_no_proof_of_work(tmp_path):
    court = court_of(tmp_path, audit_rate=0.05)
    court.state.members[WORKER].valid_blocks = 100
    court.state.members[WORKER].stake = [10] * 100  # otherwise everything would be audited
    name = submitted(court, recheck=0.0, draw=0.9)
    court.judge(name, by=FIRST)
    court.judge(name, by=SECOND)
    name = submitted(court, recheck=0.0, draw=0.0)
    court.judge(name, by=FIRST)
    court.judge(name, by=SECOND)
    assert court.state.rechecks == [] and turns_of(court, FIRST).confirmed == 1
    name = submitted(court, recheck=0.0, draw=0.0)
    court.judge(name, by=FIRST)
    for judge in (SECOND, THIRD):
        court.judge(name, by=judge, differs_from=(FIRST,))
    assert court.state.members[FIRST].failures == 1 and turns_of(court, FIRST).confirmed == 0


def test_a_slow_validator_is_first_less_often_and_a_quick_one_not_more(court):
    for key, took_s in zip(JUDGES, (0.0, 40.0, 10.0), strict=True):
        turns = court.state.members[key].turns = TurnsRecord(voted=court.now, voted_on=0, check_s=took_s)
        assert turns.check_s == took_s
    orders = []
    for draws in ((0.9, 0.1, 0.3), (0.9, 0.1, 0.5), (0.5, 0.9, 0.4)):
        lease = court.lease(WORKER)
        groups = tuple(digest(f"{lease.id}/{i}".encode()) for i in range(2))
        name, by_draw = digest("".join(groups).encode()), dict(zip(JUDGES, draws, strict=True))
        order = tuple(sorted(JUDGES, key=by_draw.__getitem__))
        court.do(Submit(WORKER, lease.id, name, 100, groups, (0.0, 0.0), order, court.now, int(court.now), by_draw))
        orders.append(court.state.submissions[name].order)
    assert orders == [(THIRD, SECOND, FIRST), (SECOND, THIRD, FIRST), (THIRD, FIRST, SECOND)]

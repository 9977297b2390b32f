"""Rollouts on which the environment fails: what the rules make of verdicts that name them, and when the run pauses."""

import msgspec
import pytest

from shoal.ledger.batches import GroupAccepted
from shoal.ledger.commands import Admin, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.fault_rate import EnvFaultRecord, GroupOutcome
from shoal.ledger.pay import Credit
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.state import state_hash
from shoal.ledger.status import batch_of
from shoal.ledger.verdicts import Decision, Rechecked
from shoal.protocol.messages import AdminRequest, EnvSpec, Faults, GroupVerdict, Verdict
from shoal.verification.verdict_diff import differences
from tests.ledger.ledger_fixture import VALIDATOR, World

WORKER, SECOND, THIRD = "a" * 64, "b" * 64, "c" * 64
WORDS, SUMS = EnvSpec("words", "d" * 64, 100, 1.0, {}), EnvSpec("sums", "e" * 64, 100, 1.0, {})
ONE = Faults((1,), said="words.py line 7: KeyError: 'x'")
"""Of four rollouts, the second."""


def world_of(tmp_path, validators=(VALIDATOR,), envs=(WORDS,), **changes):
    world = World(tmp_path, validators, envs=envs, max_staleness=50, steps=200, batch_groups=8, **changes)
    world.publish()
    world.enter(WORKER)
    return world


def admitted(world, *keys):
    """Validators that the host did not start."""
    for key in keys:
        world.do(Admin("admit", AdminRequest(key), world.now))
        world.enter(key, "validator")
    return world


def bodies(entries, kind):
    return [entry.body for entry in entries if isinstance(entry.body, kind)]


def fail_until_paused(world, faults=ONE, most=40, **how):
    """Serve groups with these faults. Returns how many rollouts were accepted."""
    for served in range(most):
        if world.state.phase == "paused":
            return served * 8
        world.serve(WORKER, faults=faults, audited=True, **how)
    return most * 8


def test_a_group_with_a_fault_is_learned_from_without_it_and_paid_whole(tmp_path):
    world = world_of(tmp_path)
    lease = world.lease(WORKER)
    made = world.judge(world.submit(WORKER, lease), faults=ONE, audited=True)
    accepted = bodies(made, GroupAccepted)
    assert [(one.signal, one.faults) for one in accepted] == [(True, ONE)] * 2
    assert [one.tokens for one in bodies(made, Credit)] == [one.tokens for one in accepted] == [10, 10]
    for _ in range(3):
        world.serve(WORKER, faults=ONE, audited=True)
    assert [member.faults for member in batch_of(world.state, 0).groups] == [(1,)] * 8


@pytest.mark.parametrize(("rewards", "faults", "signal"), [
    ((0.0, 1.0, 0.0, 1.0), (0, 2), False), ((0.0, 1.0, 1.0, 1.0), (0,), False), ((0.0, 1.0, 0.5, 1.0), (0, 1), True),
    ((0.0, 1.0, 0.5, 1.0), (0, 1, 3), False), ((0.0,) * 4, (0, 1, 2, 3), False),
])  # fmt: skip
def test_a_group_has_signal_if_half_of_it_is_left_and_differs(tmp_path, rewards, faults, signal):
    world = world_of(tmp_path)
    lease = world.lease(WORKER)
    made = world.judge(world.submit(WORKER, lease), rewards=rewards, faults=Faults(faults), audited=True)
    assert [one.signal for one in bodies(made, GroupAccepted)] == [signal] * 2


def test_a_group_with_a_fault_is_always_audited(tmp_path):
    """Else a forger that makes the environment fail would choose which rewards count."""
    world = world_of(tmp_path)
    name = world.submit(WORKER, world.lease(WORKER), draw=1.0)
    with pytest.raises(Refused, match="drawn for audit but not audited"):
        world.judge(name, faults=ONE)
    world.judge(name, faults=ONE, audited=True)
    assert world.state.accepted_groups == 2
    again = world.submit(WORKER, world.lease(WORKER), draw=1.0)
    world.judge(again)
    assert world.state.accepted_groups == 4, "without a fault the draw decides"


@pytest.mark.parametrize(("faults", "why"), [
    (Faults((4,)), "faults of other rollouts"), (Faults((1, 0)), "not in their order"),
    (Faults((-1,)), "of other rollouts"), (Faults(outside=(0, 0), score=2.0), "not in their order"),
    (Faults(), "of no rollout"), (Faults((0,), (0,), float("inf")), "not a finite number"),
    (Faults((0,), said="two\nlines"), "not one line"), (Faults((0,), said="x" * 201), "not one line"),
])  # fmt: skip
def test_faults_that_no_honest_validator_names_are_refused(tmp_path, faults, why):
    world = world_of(tmp_path)
    name = world.submit(WORKER, world.lease(WORKER))
    with pytest.raises(Refused, match=why):
        world.judge(name, faults=faults, audited=True)
    with pytest.raises(Refused, match="only an accepted group"):
        world.judge(name, "soft", faults=ONE, rewards=())


def test_validators_that_name_other_faults_differ_as_with_rewards(tmp_path):
    """And those that only word the error otherwise agree."""
    world = world_of(tmp_path, (VALIDATOR, SECOND, THIRD))
    name = world.submit(WORKER, world.lease(WORKER), recheck=0.999)
    assert bodies(world.judge(name, faults=ONE, audited=True), Decision)[0].recheck
    assert not bodies(world.judge(name, by=SECOND, faults=Faults((2,)), audited=True), Rechecked)
    worded = msgspec.structs.replace(ONE, said="words.py line 8: KeyError: 'x'")
    ended = bodies(world.judge(name, by=THIRD, faults=worded, audited=True), Rechecked)
    assert [one.outcome for one in ended] == ["confirmed"] and world.state.members[SECOND].failures == 1


def test_the_run_pauses_with_the_error_above_one_in_twenty(tmp_path):
    world = world_of(tmp_path)
    for _ in range(30):
        world.serve(WORKER)  # 240 rollouts without a fault
    assert fail_until_paused(world) == 48, "11 of the newest 200, 2 in each 8"
    assert world.state.pause_cause == (
        "environment faults: words fails on 12 of its newest 200 rollouts: words.py line 7: KeyError: 'x'"
    )
    assert world.audit().findings == []
    assert state_hash(world.audit().state) == state_hash(world.state)


def test_ten_faults_in_two_hundred_pause_nothing(tmp_path):
    world = world_of(tmp_path)
    for _ in range(5):
        for _ in range(20):
            world.serve(WORKER)
        world.serve(WORKER, faults=ONE, audited=True)
    assert world.state.phase == "running" and world.state.members[WORKER].standing == "good"


def test_after_a_resume_faults_are_counted_anew(tmp_path):
    world = world_of(tmp_path)
    assert fail_until_paused(world) == 48
    world.do(Admin("resume", AdminRequest(), world.now))
    assert world.state.phase == "running"
    assert fail_until_paused(world) == 48


def outside(*rollouts, left_out=True):
    return Faults(rollouts if left_out else (), rollouts, 2.0, "score 2.0 is outside reward_bounds")


@pytest.mark.parametrize("faults", [outside(0, 1, 2, 3), Faults((0, 1, 2, 3), (2,), 2.0)], ids=["all", "one-of-failed"])
def test_the_run_pauses_with_the_score_if_none_was_inside(tmp_path, faults):
    world = world_of(tmp_path)
    world.serve(WORKER, faults=faults, audited=True)
    assert world.state.phase == "paused"
    num = 2 * len(faults.outside)
    assert (
        f"words gives a score of 2.0, outside its reward_bounds, to {num} of its newest 8 " in world.state.pause_cause
    )


@pytest.mark.parametrize(("right", "phase"), [(-1.0, "paused"), (1.0, "running")], ids=["raised", "right"])
def test_where_faults_have_the_lowest_reward_it_is_no_score_inside(tmp_path, right, phase):
    world = world_of(tmp_path, envs=(msgspec.structs.replace(WORDS, on_fault="lowest"),))
    world.serve(WORKER, rewards=(-1.0, right, -1.0, -1.0))
    world.serve(WORKER, faults=outside(0, left_out=False), rewards=(-1.0,) * 4, audited=True)
    assert world.state.phase == phase


@pytest.mark.parametrize("left_out", [True, False], ids=["left-out", "lowest"])
def test_the_run_pauses_if_more_than_one_score_in_a_hundred_is_outside(tmp_path, left_out):
    world = world_of(tmp_path)
    for _ in range(30):
        world.serve(WORKER)
    assert fail_until_paused(world, outside(0, left_out=left_out)) == 16, "3 of the newest 200, 2 in each 8"
    assert world.state.pause_cause.startswith("environment faults: words gives a score of 2.0, ")


def test_one_validator_of_others_pauses_nothing(tmp_path):
    """Whatever it says, and whatever the others do."""
    world = admitted(world_of(tmp_path, ()), SECOND)
    fail_until_paused(world, by=SECOND, most=20)
    fail_until_paused(world, outside(0, 1, 2, 3), by=SECOND, most=20)
    assert world.state.phase == "running" and world.state.accepted_groups == 80


def test_one_validator_that_another_contradicts_pauses_nothing(tmp_path):
    world = admitted(world_of(tmp_path), SECOND)
    for _ in range(20):
        name = world.submit(WORKER, world.lease(WORKER), recheck=0.999)
        assert bodies(world.judge(name, faults=ONE, audited=True, by=SECOND), Decision)[0].recheck
        world.judge(name)
    assert world.state.phase == "running" and world.state.accepted_groups == 40
    assert world.audit().findings == []


def test_two_validators_of_others_that_agree_pause_the_run(tmp_path):
    world, served = admitted(world_of(tmp_path, ()), SECOND, THIRD), 0
    while world.state.phase == "running" and served < 20:
        name = world.submit(WORKER, world.lease(WORKER), recheck=0.999)
        world.judge(name, faults=ONE, audited=True, by=SECOND)
        assert world.state.phase == "running", "one of them is not enough"
        world.judge(name, faults=ONE, audited=True, by=THIRD)
        served += 1
    assert served == 6 and world.state.phase == "paused"
    assert world.audit().findings == []


def test_a_validator_that_does_not_come_hides_no_faults_from_the_hosts_own(tmp_path):
    world, served = admitted(world_of(tmp_path), SECOND), 0
    while world.state.phase == "running" and served < 20:
        world.judge(world.submit(WORKER, world.lease(WORKER), recheck=0.999), faults=ONE, audited=True)
        assert world.state.phase == "running", "the other may still look"
        served += 1
        world.now += 2 * LAW.dispute_s
        for _ in range(3):
            world.do(Tick(world.now))
    assert served == 6 and world.state.phase == "paused"


@pytest.mark.parametrize("absent", [False, True], ids=["alone", "other-stays-away"])
def test_one_validator_of_others_is_enough_where_the_hosts_stage_recorded_the_faults(tmp_path, absent):
    world, served = admitted(world_of(tmp_path, ()), SECOND, *((THIRD,) if absent else ())), 0
    while world.state.phase == "running" and served < 20:
        name = world.submit(WORKER, world.lease(WORKER), recheck=0.999, record="f" * 64)
        world.judge(name, faults=ONE, audited=True, by=SECOND)
        assert absent <= (world.state.phase == "running"), "the other may still look"
        served += 1
        world.now += 2 * LAW.dispute_s * absent
        for _ in range(3 * absent):
            world.do(Tick(world.now))
    assert served == 6 and world.state.phase == "paused"
    assert world.audit().findings == []


def test_a_run_of_several_environments_counts_each_by_itself(tmp_path):
    world = world_of(tmp_path, envs=(WORDS, SUMS))
    for _ in range(8):
        lease = world.lease(WORKER)
        first, second = world.state.slots_of(lease)
        name = world.submit(WORKER, lease)
        made = world.judge_of(name, {first: "words", second: "sums"}, {first: ONE})
        assert [one.env for one in bodies(made, GroupAccepted)] == ["words", "sums"]
    assert world.state.phase == "running"
    for _ in range(3):
        lease = world.lease(WORKER)
        first, second = world.state.slots_of(lease)
        made = world.judge_of(world.submit(WORKER, lease), {first: "words", second: "sums"}, {first: ONE})
    assert bodies(made, RulesChanged)[0].cause.startswith("environment faults: words fails on 11 of its newest 44")
    with pytest.raises(Wait, match="paused until its host resumes it: environment faults: words fails"):
        world.lease(WORKER)
    assert world.audit().findings == []


def test_faults_count_where_the_second_verdict_never_came(tmp_path):
    world = world_of(tmp_path, (VALIDATOR, SECOND), envs=(WORDS, SUMS))
    lease = world.lease(WORKER)
    first, second = world.state.slots_of(lease)
    accepted = GroupVerdict(first, True, "accept", rewards=(0.0, 1.0, 0.0, 1.0), tokens=10, faults=ONE)
    void = GroupVerdict(second, False, "void", "environment", "why")
    name, envs = world.submit(WORKER, lease), {first: "words", second: "sums"}
    world.do(SubmitVerdict(VALIDATOR, Verdict(name, (accepted, void)), world.now, envs=envs))
    world.now += 2 * LAW.dispute_s
    made = world.do(Tick(world.now, envs={name: envs}))
    assert [(one.env, one.confirmed) for one in bodies(made, GroupAccepted)] == [("words", True)]
    assert world.state.faults.envs["words"].newest == [GroupOutcome.of((0.0, 1.0, 0.0, 1.0), ONE)]
    assert world.audit().findings == []


def test_the_error_that_most_groups_share_is_told():
    record = EnvFaultRecord()
    for said in ("a.py line 1: KeyError: 'x'", "a.py line 9: ValueError: odd", "a.py line 1: KeyError: 'y'"):
        record.count(GroupOutcome(4, 4, said=said), LAW.fault_window)
    assert record.cause("words", LAW).endswith("12 of its newest 12 rollouts: a.py line 1: KeyError: 'y'")
    hung = "score() of task {}: its process was ended: it took longer than 10 s, at a.py line 7"
    for said in (*map(hung.format, (3, 5, 8)), "a.py line 9: ValueError: odd"):
        record.count(GroupOutcome(4, 4, said=said), LAW.fault_window)
    assert record.cause("words", LAW).endswith(hung.format(8)), "whatever their task"


def test_an_auditor_is_told_of_other_faults():
    found = GroupVerdict(0, True, "accept", rewards=(0.0, 1.0), tokens=5)
    booked = msgspec.structs.replace(found, faults=Faults((1,)))
    assert differences(booked, found, True) == ["the log leaves out rollouts [1], the environment fails on []"]
    assert differences(booked, msgspec.structs.replace(booked, faults=Faults((1,), said="other words")), True) == []
    wrong = msgspec.structs.replace(found, faults=outside(0, left_out=False))
    assert differences(wrong, found, True) == [
        "the log names other scores outside the reward_bounds than the environment gives"
    ]

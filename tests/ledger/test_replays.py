"""Joins, leaves and requests of the host that are sent again: old ones change nothing, and nobody honest is shut out."""

import pytest

from shoal.ledger.commands import Admin, AskLease, JoinRun, LeaveRun, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.members import NodeJoined, NodeLeft
from shoal.ledger.run_events import RulesChanged
from shoal.protocol.messages import AdminRequest, Join
from tests.ledger.ledger_fixture import World

WORKER, OTHER, JUDGES = "a" * 64, "b" * 64, ("1" * 64, "2" * 64, "3" * 64)


def join(created, device="cpu", key=WORKER, role="worker"):
    return JoinRun(key, Join(role, "w", 0.0, "test", "float32", device), 10_000.0, created)


def bodies(entries):
    return [entry.body for entry in entries]


def refused(world, command):
    """Refused as replayed, and nothing changed; also by a coordinator that starts again now."""
    seq, again = world.state.seq, LogWriter(Store(sqlite_url(world.path)))
    for log_writer in (world.log_writer, again):
        with pytest.raises(Refused) as refusal:
            log_writer.write(command, world.now)
        assert refusal.value.code == "replayed"
    return world.state.seq == seq == again.state.seq


# --- joins ---


def test_an_old_join_does_not_reset_a_workers_trust(tmp_path):
    world = World(tmp_path, batch_groups=40)
    world.do(join(100, "old"))
    world.do(join(200))
    world.publish()
    for _ in range(3):
        world.serve(WORKER)
    assert refused(world, join(100, "old"))
    member = world.state.members[WORKER]
    assert (member.device, member.valid_blocks, member.signed) == ("cpu", 3, 200)
    assert world.audit().findings == []


def test_another_join_of_the_same_second_is_refused_and_taken_a_second_later(tmp_path):
    world = World(tmp_path)
    world.do(join(100))
    assert refused(world, join(100, "gpu"))
    assert bodies(world.do(join(101, "gpu"))) == [NodeJoined(WORKER, "worker", "w", "test", "float32", "gpu", 101)]


# --- leaves ---


def test_a_node_that_leaves_gives_back_its_leases_and_gets_no_more_until_it_joins_again(tmp_path):
    world = World(tmp_path)
    world.do(join(100))
    world.publish()
    lease = world.lease(WORKER)
    assert bodies(world.do(LeaveRun(WORKER, world.now, 200))) == [
        LeaseLapsed(lease.id, "returned"),
        NodeLeft(WORKER, 200),
    ]
    with pytest.raises(Refused, match="has left this run"):
        world.do(AskLease(WORKER, (), 0.0, world.now))
    assert world.do(LeaveRun(WORKER, world.now, 200)) == world.do(LeaveRun(WORKER, world.now, 201)) == []
    assert refused(world, join(100)) and refused(world, join(200))
    assert bodies(world.do(join(202))) == [NodeJoined(WORKER, "worker", "w", "test", "float32", "cpu", 202)]
    assert refused(world, LeaveRun(WORKER, world.now, 200)) and refused(world, LeaveRun(WORKER, world.now, 202))
    assert not world.state.members[WORKER].left
    assert world.audit().findings == []


def test_coming_back_keeps_pay_standing_and_trust(tmp_path):
    world = World(tmp_path, batch_groups=40)
    world.do(join(100))
    world.publish()
    for _ in range(3):
        world.serve(WORKER)
    before = world.state.members[WORKER]
    kept = (before.credits, before.standing, before.valid_blocks, before.accepted)
    world.do(LeaveRun(WORKER, world.now, 200))
    world.do(join(201))
    after = world.state.members[WORKER]
    assert (after.credits, after.standing, after.valid_blocks, after.accepted) == kept and kept[0] > 0


def test_a_validator_that_left_judges_nothing_and_the_others_do_not_wait_for_it(tmp_path):
    world = World(tmp_path, JUDGES)
    world.do(join(100))
    world.publish()
    submission = world.submit(WORKER, world.lease(WORKER), order=JUDGES)
    world.do(LeaveRun(JUDGES[0], world.now, 200))
    assert world.state.judges() == list(JUDGES[1:])
    with pytest.raises(Refused, match="has left this run"):
        world.judge(submission, by=JUDGES[0])
    world.judge(submission, by=JUDGES[1])
    assert world.state.submissions[submission].decided and world.state.members[JUDGES[0]].turns.missed == 0
    world.do(join(201, key=JUDGES[0], role="validator"))
    assert world.state.judges() == list(JUDGES)
    assert world.audit().findings == []


@pytest.mark.parametrize(("outcome", "recheck"), [("hard", 1.0), ("accept", 0.0)])
def test_nobody_judges_alone_because_the_others_left(tmp_path, outcome, recheck):
    """A host restarts its validators; meanwhile the last one could rob honest workers, or accept what its friends send."""
    world = World(tmp_path, JUDGES)
    world.do(join(100))
    world.publish()
    for _ in range(2):
        world.judge(world.submit(WORKER, world.lease(WORKER), order=JUDGES), by=JUDGES[0])
    credits = world.state.members[WORKER].credits
    submission = world.submit(WORKER, world.lease(WORKER), order=JUDGES, recheck=recheck)
    for key in JUDGES[1:]:
        world.do(LeaveRun(key, world.now, 200))
    world.judge(submission, outcome, by=JUDGES[0])
    assert (submission in world.state.rechecks) is (outcome == "accept")
    assert (submission in world.state.pending) is (outcome == "hard")
    assert world.state.members[WORKER].credits >= credits > 0
    world.now += LAW.dispute_s + 1
    while world.do(Tick(world.now)):
        pass
    assert not world.state.pending and not world.state.rechecks and world.state.members[WORKER].credits >= credits
    assert world.audit().findings == []


@pytest.mark.parametrize("how", ["late", "left"])
def test_a_forgery_that_a_recheck_cannot_settle_costs_trust(tmp_path, how):
    world = World(tmp_path, JUDGES)
    world.do(join(100))
    world.publish()
    world.judge(world.submit(WORKER, world.lease(WORKER), order=JUDGES), by=JUDGES[0])
    submission = world.submit(WORKER, world.lease(WORKER), order=JUDGES, recheck=0.0)
    world.judge(submission, by=JUDGES[0])
    assert world.state.members[WORKER].valid_blocks == 2
    if how == "left":
        world.do(LeaveRun(JUDGES[2], world.now, 200))
    world.judge(submission, "hard", by=JUDGES[1])
    world.tick(2 * LAW.dispute_s)
    assert not world.state.rechecks and world.state.members[WORKER].valid_blocks == 0
    assert world.audit().findings == []


def test_blocks_are_not_withheld_for_workers_that_left(tmp_path):
    world = World(tmp_path)
    for key in (WORKER, OTHER):
        world.do(join(100, key=key))
    world.publish()
    world.serve(OTHER)
    lease = world.lease(WORKER)
    world.do(LeaveRun(OTHER, world.now, 200))
    world.do(LeaveRun(WORKER, world.now, 201))
    world.do(join(202))
    assert world.lease(WORKER).blocks == lease.blocks


# --- the host ---


def test_an_old_pause_does_not_stop_a_run_that_was_resumed(tmp_path):
    world = World(tmp_path)
    world.do(Admin("pause", AdminRequest(), world.now, 100))
    assert world.do(Admin("pause", AdminRequest(), world.now, 100)) == []
    assert refused(world, Admin("resume", AdminRequest(), world.now, 100))
    world.do(Admin("resume", AdminRequest(), world.now, 101))
    assert refused(world, Admin("pause", AdminRequest(), world.now, 100)) and world.state.phase == "running"


def test_an_old_resume_does_not_continue_a_run_that_has_paused_itself(tmp_path):
    """Also if it changed nothing when it was sent."""
    world = World(tmp_path, max_flat_groups=2)
    world.do(join(50))
    world.publish()
    assert bodies(world.do(Admin("resume", AdminRequest(), world.now, 100))) == [RulesChanged(created=100)]
    assert world.do(Admin("resume", AdminRequest(), world.now, 100)) == []
    world.serve(WORKER, rewards=(1.0,) * 4)
    assert world.state.phase == "paused" and world.state.pause_cause == "no signal"
    assert refused(world, Admin("resume", AdminRequest(), world.now, 100)) and world.state.phase == "paused"
    world.do(Admin("resume", AdminRequest(), world.now, 101))
    assert world.state.phase == "running" and world.audit().findings == []


def test_a_kick_that_takes_leases_is_audited_with_the_time_of_its_signature(tmp_path):
    world = World(tmp_path)
    world.do(join(100))
    world.publish()
    lease = world.lease(WORKER)
    events = bodies(world.do(Admin("kick", AdminRequest(WORKER), world.now, 300)))
    assert events == [LeaseLapsed(lease.id, "kicked"), RulesChanged(kicked=WORKER, created=300)]
    assert world.do(Admin("kick", AdminRequest(WORKER), world.now, 300)) == []
    assert bodies(world.do(Admin("kick", AdminRequest(WORKER), world.now, 301))) == [RulesChanged(created=301)]
    assert world.audit().findings == []

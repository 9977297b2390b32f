"""A run whose groups all have equal rewards: it says so, stops leasing, and waits for its host."""

import pytest
from msgspec import UNSET

from shoal.ledger.commands import Admin, Reconfigure, ReturnLeases
from shoal.ledger.errors import Wait
from shoal.ledger.lease_granting import without_signal
from shoal.ledger.run_events import RulesChanged
from shoal.protocol.messages import AdminRequest, Faults
from shoal.verification.verify import STOPPED
from tests.ledger.ledger_fixture import assert_holds, started

WORKER = "a" * 64
FLAT, ALSO_FLAT = (0.0,) * 4, (1.0,) * 4


def world_of(tmp_path, **changes):
    return started(tmp_path, WORKER, **({"max_flat_groups": 6, "steps": 50} | changes))


def test_a_run_without_signal_stops_leasing_and_waits_for_its_host(tmp_path):
    world = world_of(tmp_path)
    for rewards in (FLAT, ALSO_FLAT, FLAT):
        assert world.state.phase == "running"
        world.serve(WORKER, rewards=rewards)
    assert world.state.phase == "paused" and world.state.members[WORKER].credits == 60
    with pytest.raises(Wait, match=r"6 groups have no signal: within each all rewards are equal, 0\.333 on average"):
        world.lease(WORKER)
    assert world.audit().entries[-1].body == RulesChanged(phase="paused", cause="no signal")
    assert_holds(world)


def test_a_resumed_run_starts_its_count_again(tmp_path):
    world = world_of(tmp_path)
    for _ in range(2):
        for _ in range(3):
            world.serve(WORKER, rewards=FLAT)
        assert world.state.phase == "paused"
        world.do(Admin("resume", AdminRequest(), world.now))
        assert world.state.phase == "running" and world.state.main.flat == 0
    assert_holds(world)


def test_a_group_with_signal_or_a_batch_starts_the_count_again(tmp_path):
    world = world_of(tmp_path)
    for _ in range(4):
        world.serve(WORKER, rewards=FLAT)
        world.serve(WORKER, rewards=FLAT)
        world.serve(WORKER)
        world.publish_if_due()
    assert world.state.phase == "running" and len(world.state.main.batches) == 2
    assert_holds(world)


def test_work_already_leased_is_judged_while_the_run_is_paused_and_forms_its_batch(tmp_path):
    world = world_of(tmp_path)
    world.enter("b" * 64)
    others = [world.lease("b" * 64)]
    others.append(world.lease("b" * 64, [others[0].id]))
    for _ in range(3):
        world.serve(WORKER, rewards=FLAT)
    for lease in others:
        world.judge(world.submit("b" * 64, lease))
    assert world.state.phase == "paused" and 0 in world.state.main.batches
    world.publish()
    assert_holds(world)


@pytest.mark.parametrize(("action", "phase"), [("pause", "paused"), ("drain", "ended")])
def test_a_run_that_its_host_paused_or_drained_is_left_as_it_is(tmp_path, action, phase):
    world = world_of(tmp_path, max_flat_groups=2)
    name = world.submit(WORKER, world.lease(WORKER))
    world.do(Admin(action, AdminRequest(), world.now))
    world.judge(name, rewards=FLAT)
    assert (world.state.phase, world.state.pause_cause) == (phase, "")
    assert_holds(world)


@pytest.mark.parametrize("limit", [0, 1000])
def test_without_a_limit_or_below_it_the_run_goes_on(tmp_path, limit):
    world = world_of(tmp_path, max_flat_groups=limit)
    for _ in range(10):
        world.serve(WORKER, rewards=FLAT)
    assert world.state.phase == "running" and world.state.main.flat == 20
    assert_holds(world)


def test_a_resumed_folder_may_have_another_limit(tmp_path):
    world = world_of(tmp_path)
    world.do(Reconfigure({"other": 1}, 50, 10.0, world.now, max_flat_groups=2))
    world.serve(WORKER, rewards=FLAT)
    assert world.state.phase == "paused"
    world.do(Reconfigure({"other": 2}, 50, 10.0, world.now, max_flat_groups=0))
    world.do(Admin("resume", AdminRequest(), world.now))
    for _ in range(10):
        world.serve(WORKER, rewards=FLAT)
    assert world.state.phase == "running"
    assert_holds(world)


def test_a_few_groups_without_signal_are_not_reported(tmp_path):
    world = world_of(tmp_path)
    world.serve(WORKER, rewards=FLAT)
    assert without_signal(world.state, world.state.main) == ""
    world.serve(WORKER, rewards=FLAT)
    assert without_signal(world.state, world.state.main).startswith("the last 4 groups have no signal")


JUDGES = ("v" * 64, "w" * 64)
LONG = "task 7 of long cannot begin: its prompt takes 90 tokens, and sampling.max_tokens = 64 leaves no room for a turn"


def serve_void(world, detail=LONG, check="environment"):
    submission = world.submit(WORKER, world.lease(WORKER))
    for judge in JUDGES:
        world.judge(submission, "void", by=judge, check=check, detail=detail)


def test_slots_whose_tasks_cannot_begin_pause_the_run_as_groups_without_signal_do(tmp_path):
    world = world_of(tmp_path, validators=JUDGES)
    for _ in range(3):
        assert world.state.phase == "running"
        serve_void(world)
    assert world.state.phase == "paused" and world.state.main.flat == 6
    with pytest.raises(Wait, match="the last 6 groups have no signal: the tasks of 6 of them can never begin") as waits:
        world.lease(WORKER)
    assert f"; the last: {LONG}" in str(waits.value)
    assert_holds(world)
    world.do(Admin("resume", AdminRequest(), world.now))
    assert world.state.phase == "running" and world.state.main.flat == 0 and not world.state.main.unbegun
    world.serve(WORKER, rewards=FLAT, by=JUDGES[0])
    serve_void(world)
    said = without_signal(world.state, world.state.main)
    assert "within 2 of them all rewards are equal, 0 on average; the tasks of 2 of them can never begin" in said
    world.serve(WORKER, by=JUDGES[0])
    assert world.state.main.flat == 0 and without_signal(world.state, world.state.main) == ""
    assert_holds(world)


def test_blocks_that_stop_everywhere_pause_the_run_as_groups_without_signal_do(tmp_path):
    world = world_of(tmp_path, validators=JUDGES)
    for times in range(12):
        assert world.state.phase == "running", times
        lease = world.lease(WORKER)
        world.do(ReturnLeases(WORKER, (lease.id,), world.now, lease.blocks[0], "task 3 of words"))
        world.now += 1000.0
    assert world.state.phase == "paused" and world.state.main.flat == 6
    assert without_signal(world.state, world.state.main) == (
        "the last 6 groups have no signal: in 6 of them a call took too long, or ended its process, everywhere; "
        "the last: task 3 of words"
    )
    assert_holds(world)
    world.do(Admin("resume", AdminRequest(), world.now))
    assert world.state.phase == "running" and world.state.main.stopped is UNSET


def test_groups_of_which_faults_leave_too_few_rollouts_are_counted_apart(tmp_path):
    world = world_of(tmp_path, max_flat_groups=0)
    world.serve(WORKER, rewards=ALSO_FLAT)
    for rollouts in ((0, 1, 2), (0, 1, 2, 3)):
        world.serve(WORKER, rewards=FLAT, faults=Faults(rollouts), audited=True)
    stream = world.state.main
    assert (stream.flat, stream.failed, stream.num_equal, stream.mean_flat_reward) == (6, 4, 2, 1.0)
    said = without_signal(world.state, stream)
    assert "within 2 of them all rewards are equal, 1 on average; in 4 of them the environment fails" in said
    assert_holds(world)
    world.serve(WORKER)
    assert stream.failed is UNSET


def test_replays_that_are_stopped_are_no_tasks_that_cannot_begin(tmp_path):
    """A worker's actions can make an environment hang where validators replay it: they pause no run."""
    world = world_of(tmp_path, validators=JUDGES)
    for _ in range(6):
        serve_void(world, STOPPED, "replay")
    assert world.state.phase == "running" and world.state.main.flat == 0
    assert_holds(world)

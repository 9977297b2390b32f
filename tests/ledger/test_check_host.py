"""A host that moves its clock or keeps links back is found, and an honest host whose clock is corrected is not."""

import pytest

from shoal.ledger.commands import Admin, Submit, Tick
from shoal.ledger.errors import Refused
from shoal.ledger.event import GENESIS
from shoal.ledger.event_types import make_entry
from shoal.ledger.leases import LeaseGranted, LeaseLapsed
from shoal.ledger.log.check import verify
from shoal.ledger.submissions import SubmissionReceived
from shoal.protocol.encoding import digest
from shoal.protocol.messages import AdminRequest
from tests.ledger.ledger_fixture import started, without_links

RIVAL, FRIEND = "a" * 64, "b" * 64
HOUR_S = 3600.0


@pytest.fixture
def world(tmp_path):
    return started(tmp_path, (RIVAL, FRIEND), batch_groups=8)


def lines_of(world):
    return [(entry.time, entry.body) for entry in world.audit().entries]


def findings(lines, now=None):
    """Of a log with these events, every hash fitting."""
    rows, head = [], GENESIS
    for seq, (time, body) in enumerate(lines):
        entry = make_entry(seq, time, body, head)
        rows.append((entry.data, entry.hash))
        head = entry.hash
    return without_links(verify(rows, (), now).findings)


# --- the clock ---


def test_a_clock_that_is_set_back_by_two_seconds_costs_nobody_anything(world):
    lease = world.lease(RIVAL)
    before, world.now = world.now, world.now - 2.0
    world.judge(world.submit(RIVAL, lease))
    assert world.state.members[RIVAL].accepted == 2 and world.lease(FRIEND).deadline == before + 10.0
    assert {entry.time for entry in world.audit().entries} == {before}
    assert world.audit(now=before - 60.0).findings == []


def test_a_log_whose_times_fall_is_found(world):
    world.serve(RIVAL)
    world.serve(FRIEND)
    lines = lines_of(world)
    assert findings(lines) == []
    fallen = [*lines[:-1], (lines[-1][0] - 2.0, lines[-1][1])]
    assert f"the time falls by 2.000 s at event {len(lines) - 1}: no coordinator writes this" in findings(fallen)


def lapsed_early(world):
    """The rival's lease ends because the host's clock jumps ahead by an hour."""
    world.lease(RIVAL)
    world.now += 3.0
    false_time = world.now + HOUR_S
    jumped = world.log_writer.write(Tick(false_time), false_time)
    assert [entry.body for entry in jumped] == [LeaseLapsed("0", "deadline")]


def test_after_a_jump_of_an_hour_no_submission_can_be_booked_for_an_hour(world):
    """An hour to lapse a rival's lease costs the host an hour of the run."""
    lapsed_early(world)
    lease = world.lease(FRIEND)
    assert lease.issued == world.now + HOUR_S
    with pytest.raises(Refused, match=r"3600 s off \(limit 90"):
        world.submit(FRIEND, lease)
    world.now += HOUR_S
    world.judge(world.submit(FRIEND, lease))
    assert world.audit(now=world.now).findings == []


def test_a_log_that_is_ahead_of_the_readers_clock_is_found(world):
    lapsed_early(world)
    (finding,) = world.audit(now=world.now).findings
    assert "the newest event is 3600 s ahead of this machine's clock" in finding


def test_a_host_that_jumps_and_goes_on_is_found_by_what_workers_signed(world):
    """It sets its clock back after the jump, or books true times of signing at false times of events."""
    lapsed_early(world)
    lines = lines_of(world)
    set_back = [*lines, (lines[-2][0], LeaseGranted("1", FRIEND, 0, (0,), lines[-2][0] + 10.0))]
    assert any("the time falls by 3603.000 s at event" in finding for finding in findings(set_back))
    late = lines[-1][0] + 10.0
    granted = [*lines, (lines[-1][0], LeaseGranted("1", FRIEND, 0, (0,), late, soft=late))]
    assert findings(granted) == []
    groups = tuple(digest(b"%d" % index) for index in range(2))
    booked = [*granted, (lines[-1][0], SubmissionReceived("1", FRIEND, "5" * 64, 100, groups, int(world.now)))]
    assert any("(submission_received) is against the rules" in finding for finding in findings(booked))


@pytest.mark.parametrize("skew_s", [-59, 59])
def test_a_worker_whose_clock_is_wrong_by_less_than_the_window_is_booked(world, skew_s):
    lease = world.lease(RIVAL)
    world.do(submit(world, lease, world.now + skew_s))
    assert world.audit().findings == []


def test_an_upload_may_take_as_long_as_the_server_lets_it(world):
    """The largest body at the slowest rate, by a worker whose clock is late."""
    lease = world.lease(RIVAL)
    created = world.now - 59
    world.now += 256 * 30.0
    with pytest.raises(Refused, match="limit 90"):
        world.do(submit(world, lease, created))
    world.do(submit(world, lease, created, size_bytes=64 << 20))
    assert world.audit().findings == []


def submit(world, lease, created, size_bytes=100):
    groups = tuple(digest(b"%d" % index) for index in range(2))
    return Submit(lease.worker, lease.id, "5" * 64, size_bytes, groups, (0.0, 0.0), (), world.now, int(created))


# --- links; logs of real runs are in tests/roles/test_audit.py ---


def hidden(world, now=None):
    """What is said of the links of this world, which has none."""
    found = verify(world.log_writer.store.read(), (), now).findings
    assert without_links(found) == []
    return [
        finding.removeprefix("the link of version ").split(" is not revealed, so its groups")[0] for finding in found
    ]


def say_of(world, version, now=None):
    found = verify(world.log_writer.store.read(), (), now).findings
    return next((f.partition("audited: ")[2] for f in found if f.startswith(f"the link of version {version} ")), "")


def fill(world, *keys):
    """Serve workers until the next batch is formed, then publish."""
    while world.state.main.version not in world.state.main.batches:
        for key in keys:
            world.serve(key)
    world.publish()


def test_each_version_that_is_retired_must_have_its_link(world):
    fill(world, RIVAL)
    assert hidden(world) == []
    fill(world, RIVAL)
    assert hidden(world) == ["0"] and say_of(world, 0).startswith("it was due after event ")
    fill(world, RIVAL)
    assert hidden(world) == ["0", "1"]


@pytest.mark.parametrize(("minutes", "found"), [(10, False), (59, False), (61, True)])
def test_a_link_may_wait_for_a_submission_only_while_later_ones_wait_too(world, minutes, found):
    """A host that never judges a friend's submission would keep a whole version from being audited."""
    kept = world.submit(FRIEND, world.lease(FRIEND))
    world.now += 7200.0  # nothing is judged meanwhile: the validators are busy, or away
    fill(world, RIVAL)
    fill(world, RIVAL)
    assert hidden(world, now=world.now) == []
    world.now += minutes * 60.0
    world.serve(RIVAL)
    assert hidden(world) == (["0"] if found else [])
    said = f"submission {kept[:12]} is still not judged, 3660 s after later ones were judged"
    assert say_of(world, 0) == (said if found else "")


def test_an_ended_run_must_have_revealed_every_link(tmp_path):
    world = started(tmp_path, RIVAL)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert world.state.phase == "ended" and hidden(world) == []
    assert hidden(world, now=world.now + 59.0) == []
    assert "the run ended 61 s ago" in say_of(world, 0, now=world.now + 61.0)


def test_an_ended_run_waits_an_hour_for_its_last_verdicts(tmp_path):
    world = started(tmp_path, (RIVAL, FRIEND), steps=3)
    kept = world.submit(FRIEND, world.lease(FRIEND))
    world.now += 60.0  # from now on another worker may make the block, so the run goes on
    for _ in range(3):
        fill(world, RIVAL)
    assert world.state.phase == "ended" and say_of(world, 0, now=world.now + 3599.0) == ""
    assert kept[:12] in say_of(world, 0, now=world.now + 3601.0)

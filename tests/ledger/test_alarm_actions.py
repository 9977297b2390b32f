"""What an alarm makes a host do: signed requests with their evidence, which every replay understands."""

import msgspec
import pytest

from shoal.ledger.commands import Admin, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.event_types import make_entry
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.log.check import report
from shoal.ledger.log.pay_history import explain
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.ledger.members import NodeQuarantined
from shoal.ledger.run_events import RulesChanged
from shoal.ledger.state import state_hash
from shoal.ledger.status import awaited, batch_of
from shoal.protocol.constants import MAX_MEASURED, MIN_LR_FACTOR
from shoal.protocol.encoding import WireError, from_json, to_json
from shoal.protocol.messages import AdminRequest, AlarmEvidence, Measured
from tests.ledger.ledger_fixture import VALIDATOR, World, started

WORKER = "a" * 64
FALL = AlarmEvidence("collapse", 12, 15, (Measured("reward_all_mean", 0.1, 0.35),))


def bodies(entries):
    return [entry.body for entry in entries]


def test_a_pause_by_an_alarm_says_why_and_a_later_look_reads_the_same(tmp_path):
    world = World(tmp_path)
    world.publish()
    assert bodies(world.do(Admin("pause", AdminRequest(evidence=FALL), world.now, 100))) == [
        RulesChanged(phase="paused", cause="alarm: collapse", created=100, evidence=FALL)
    ]
    again = LogWriter(Store(sqlite_url(world.path))).state
    assert state_hash(again) == state_hash(world.state) and again.pause_cause == "alarm: collapse"
    assert "alarm: collapse" in awaited(world.state)[0]
    audit = world.audit()
    assert audit.findings == []
    assert "alarm collapse, raised at step 12: reward_all_mean 0.1 (limit 0.35)" in report(audit)


def test_an_alarm_about_a_run_that_is_paused_already_is_logged_and_changes_nothing(tmp_path):
    world = World(tmp_path)
    world.do(Admin("pause", AdminRequest(), world.now, 100))
    assert bodies(world.do(Admin("pause", AdminRequest(evidence=FALL), world.now, 101))) == [
        RulesChanged(created=101, evidence=FALL)
    ]
    assert world.state.pause_cause == "" and world.audit().findings == []


def test_the_same_request_again_after_a_lost_answer_changes_nothing(tmp_path):
    world = World(tmp_path)
    world.publish()
    world.enter(WORKER)
    for action, facts in (("pause", {}), ("rate", {"lr_factor": 0.5}), ("quarantine", {})):
        node = WORKER if action == "quarantine" else ""
        asked = Admin(action, AdminRequest(node, evidence=FALL, **facts), world.now, 100 + world.state.seq)
        assert world.do(asked)
        assert LogWriter(Store(sqlite_url(world.path))).write(asked, world.now) == [], action


def test_a_lower_rate_begins_with_the_next_batch_that_is_formed(tmp_path):
    world = started(tmp_path, WORKER, batch_groups=2, steps=9)
    world.serve(WORKER)
    world.do(Admin("rate", AdminRequest(lr_factor=0.5), world.now, 100))
    assert sorted(world.state.main.batches) == [0] and batch_of(world.state, 0).lr_factor is msgspec.UNSET
    world.publish()
    world.serve(WORKER)
    world.do(Admin("rate", AdminRequest(lr_factor=0.25), world.now, 101))
    world.do(Admin("rate", AdminRequest(lr_factor=1.0), world.now, 102))
    world.publish()
    world.serve(WORKER)
    assert [batch_of(world.state, step).lr_factor for step in sorted(world.state.main.batches)] == [
        msgspec.UNSET, 0.5, msgspec.UNSET,
    ]  # fmt: skip
    assert world.audit().findings == []
    assert state_hash(LogWriter(Store(sqlite_url(world.path))).state) == state_hash(world.state)


def test_a_quarantine_by_the_host_takes_leases_ends_and_is_decided_again_by_an_auditor(tmp_path):
    world = started(tmp_path, WORKER)
    lease = world.lease(WORKER)
    until = world.now + LAW.max_quarantine_s
    assert bodies(world.do(Admin("quarantine", AdminRequest(WORKER, evidence=FALL), world.now, 100))) == [
        LeaseLapsed(lease.id, "quarantine by host"),
        NodeQuarantined(WORKER, until, "the host asked for it"),
        RulesChanged(quarantined=WORKER, created=100, evidence=FALL),
    ]
    with pytest.raises(Wait, match="quarantined by the host"):
        world.lease(WORKER)
    assert world.state.members[WORKER].lapsed == 0
    told = [line.detail for line in explain(world.audit().entries, world.state, WORKER)]
    assert any("no leases for 3600 s" in line for line in told) and any("alarm collapse" in line for line in told)
    world.now = until + 1
    world.do(Tick(world.now))
    assert world.lease(WORKER) and world.audit().findings == []


def test_a_quarantine_that_no_request_and_no_verdict_led_to_is_found(tmp_path):
    world = World(tmp_path)
    world.enter(WORKER)
    entry = make_entry(
        world.state.seq + 1, world.now, NodeQuarantined(WORKER, world.now + 9, "because"), world.state.head
    )
    world.log_writer.store.append([entry])
    assert any("follows from nothing" in finding for finding in world.audit().findings)


def test_only_workers_are_quarantined(tmp_path):
    world = World(tmp_path)
    with pytest.raises(Refused, match="only workers are quarantined"):
        world.do(Admin("quarantine", AdminRequest(VALIDATOR), world.now, 100))


@pytest.mark.parametrize(
    ("action", "node", "more", "why"),
    [
        (
            "drain",
            "dora",
            {},
            "drain takes no node, and 'dora' was given: it ends the run for all; see kick, quarantine",
        ),
        ("pause", "dora", {}, "pause takes no node"),
        ("resume", WORKER, {}, "resume takes no node"),
        ("rate", "dora", {"lr_factor": 0.5}, "rate takes no node"),
        ("kick", WORKER, {"also": (VALIDATOR,)}, "kick takes one node"),
        ("drain", "", {"also": ("dora",)}, "drain takes one node"),
        ("quarantine", WORKER, {"lr_factor": 0.5}, "quarantine takes no factor"),
    ],
)
def test_an_action_takes_nothing_that_belongs_to_another(tmp_path, action, node, more, why):
    world = World(tmp_path)
    world.publish()
    world.enter(WORKER)
    before = world.state.seq
    with pytest.raises(Refused, match=why):
        world.do(Admin(action, AdminRequest(node, **more), world.now, 100))
    assert world.state.seq == before and world.state.phase == "running"


def test_a_rate_without_a_factor_is_refused(tmp_path):
    with pytest.raises(Refused, match="--factor"):
        (world := World(tmp_path)).do(Admin("rate", AdminRequest(), world.now, 100))


def test_a_hostile_host_can_make_neither_a_long_log_nor_a_rate_out_of_bounds():
    """Auditors read what a log holds, so what no coordinator writes is not an event to them."""
    figure = {"name": "x", "value": 1.0, "limit": 1.0}
    good = {"cause": "drift", "since": 1, "step": 1, "measured": [figure] * MAX_MEASURED}
    assert from_json(to_json({"evidence": good, "lr_factor": MIN_LR_FACTOR}), RulesChanged)
    for bad in (
        {"lr_factor": MIN_LR_FACTOR / 2},
        {"lr_factor": 1.5},
        {"evidence": good | {"measured": [figure] * (MAX_MEASURED + 1)}},
        {"evidence": good | {"cause": "x" * 33}},
        {"evidence": good | {"cause": "drift\n"}},
        {"evidence": good | {"node": "n" * 65}},
        {"evidence": good | {"since": -1}},
        {"evidence": good | {"measured": [figure | {"name": "\x1b[2J"}]}},
        {"evidence": good | {"measured": [figure | {"value": 1e300}]}},
    ):
        with pytest.raises(WireError):
            from_json(to_json(bad), RulesChanged)

"""What a bad member may send: the rules refuse it, it delays nobody else, and no state is half changed."""

import asyncio

import pytest

from shoal.ledger import event_types
from shoal.ledger.batch_selection import groups_wanted
from shoal.ledger.batches import GroupAccepted, SlotVoid
from shoal.ledger.commands import Admin, AskLease, JoinRun, Publish, ReturnLeases, Submit, SubmitVerdict, Tick
from shoal.ledger.constants import LAW
from shoal.ledger.errors import Refused
from shoal.ledger.log.writer import replay
from shoal.ledger.members import ValidatorFault
from shoal.ledger.pay import Forfeited, Slash
from shoal.ledger.state import state_hash
from shoal.ledger.submissions import AuditDrawn
from shoal.ledger.verdict_decisions import to_judge
from shoal.ledger.verdicts import Decision, Rechecked
from shoal.protocol.audit_and_pay import CHECKS, REPLAY
from shoal.protocol.constants import MAX_LEASE_BLOCKS
from shoal.protocol.encoding import digest
from shoal.protocol.message_sizes import most_lease_blocks
from shoal.protocol.messages import AdminRequest, GroupVerdict, Join, Verdict
from shoal.verification.checks_with_model import AUDIT
from shoal.verification.checks_without_model import MODEL_FREE
from tests.ledger.ledger_fixture import TRAINER, started

WORKER = "a" * 64
JUDGES = ("d" * 64, "e" * 64, "f" * 64)


@pytest.fixture
def court(tmp_path):
    """A run with three validators and one worker."""
    return started(tmp_path, WORKER, JUDGES, steps=200, max_staleness=50, audit_rate=0.05)


def bodies(entries, kind):
    return [entry.body for entry in entries if isinstance(entry.body, kind)]


def test_the_log_does_not_tell_the_first_validator_whether_a_recheck_follows(court):
    for recheck in (0.0, 1.0):
        name = court.submit(WORKER, court.lease(WORKER), salt=str(recheck), recheck=recheck)
        (drawn,) = (e.body for e in court.audit().entries if getattr(e.body, "submission", "") == name)
        assert isinstance(drawn, AuditDrawn) and not hasattr(drawn, "recheck")
        (decision,) = bodies(court.judge(name, by=JUDGES[0]), Decision)
        assert decision.recheck == (recheck == 0.0)


@pytest.mark.parametrize("speed", [1e308, 1e18, 0.0])
def test_a_claimed_speed_of_any_size_gets_a_lease_of_legal_size(court, speed):
    court.work(WORKER, 3, by=JUDGES[0])
    court.do(AskLease(WORKER, (), speed, court.now))
    (lease,) = court.state.open_leases_of(WORKER)
    assert 1 <= len(lease.blocks) <= MAX_LEASE_BLOCKS


@pytest.mark.parametrize(
    "facts",
    [
        {"rewards": (1e7, 0.0, 0.0, 0.0)},
        {"rewards": (float("inf"), 0.0, 0.0, 0.0)},
        {"rewards": (float("nan"),) * 4},
        {"rewards": (0.0,)},
        {"tokens": 10**400},
        {"tokens": 4 * 64 + 1},
        {"tokens": -1},
        {"flipped": 11},
        {"gap_sum": float("inf")},
        {"gap_sum": float("nan")},
        {"off_sum": float("inf")},
        {"off_weighted": float("nan")},
        {"detail": "x" * 301},
        {"detail": "two\nlines"},
        {"check": "\x1b[31m"},
    ],
    ids=lambda facts: f"{next(iter(facts))} {str(next(iter(facts.values())))[:12]!r}",
)
def test_a_verdict_with_figures_that_no_group_has_is_refused(court, facts):
    name = court.submit(WORKER, court.lease(WORKER))
    before = state_hash(court.state)
    with pytest.raises(Refused):
        court.judge(name, by=JUDGES[0], **facts)
    assert state_hash(court.state) == before


def test_a_bug_in_the_rules_delays_nobody_else_and_leaves_the_state_of_the_log(court, monkeypatch):
    name = court.submit(WORKER, court.lease(WORKER))
    lease = court.state.leases[court.state.submissions[name].lease]
    groups = tuple(GroupVerdict(slot, True, "accept", rewards=(0.0,) * 4) for slot in court.state.slots_of(lease))

    def broken(*_):
        raise ZeroDivisionError("a bug")

    async def scenario():
        monkeypatch.setitem(event_types._COMMANDS, SubmitVerdict, broken)
        joins = [
            JoinRun(f"{i}" * 64, Join("worker", f"w{i}", 0.0, "test", "float32", "cpu"), court.now) for i in (1, 2)
        ]
        asked = [joins[0], SubmitVerdict(JUDGES[0], Verdict(name, groups), court.now), joins[1]]
        return await asyncio.wait_for(
            asyncio.gather(*(court.log_writer.submit(command) for command in asked), return_exceptions=True), 2.0
        )

    first, bug, last = asyncio.run(scenario())
    assert isinstance(bug, ZeroDivisionError) and len(first) == len(last) == 1
    assert {"1" * 64, "2" * 64} <= court.state.members.keys()
    assert state_hash(court.state) == state_hash(replay(court.log_writer.store.read()))


def test_a_key_has_one_role_so_nobody_judges_its_own_work(court):
    court.do(Admin("admit", AdminRequest(WORKER), court.now))
    with pytest.raises(Refused, match="joined as a worker: for another role use another key"):
        court.enter(WORKER, "validator")


def test_two_hard_verdicts_slash_only_if_both_audited_or_neither_did(court):
    """A validator that audited and one that did not found different things, so they do not agree on a forgery."""
    court.work(WORKER, 2, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, "hard", by=JUDGES[0], audited=False)
    entries = court.judge(name, "hard", by=JUDGES[1], audited=True)
    assert bodies(entries, Decision) and not bodies(entries, Slash)
    (forfeited,) = bodies(entries, Forfeited)
    assert forfeited.tokens == 40 and court.audit().findings == []


def test_the_second_validator_is_at_fault_if_the_third_clears_the_first_that_it_accused(court):
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(name, by=JUDGES[0])
    court.judge(name, by=JUDGES[1], differs_from=JUDGES[:1])
    entries = court.judge(name, by=JUDGES[2], differs_from=JUDGES[1:2])
    assert [fault.validator for fault in bodies(entries, ValidatorFault)] == [JUDGES[1]]


def test_one_verdict_cannot_void_a_slot_if_another_can_be_had(court):
    name = court.submit(WORKER, court.lease(WORKER))
    assert not bodies(court.judge(name, "void", by=JUDGES[0], audited=False), Decision)
    for judge in JUDGES[1:]:
        entries = court.judge(name, by=judge)
    assert len(bodies(entries, GroupAccepted)) == 2 and not bodies(entries, SlotVoid)


def test_nothing_vests_while_a_recheck_is_open(court):
    court.work(WORKER, LAW.vesting_blocks, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(name, by=JUDGES[0])
    court.work(WORKER, 5, by=JUDGES[0])
    assert court.state.members[WORKER].vested == 0
    for judge in JUDGES[1:]:
        court.judge(name, "hard", by=judge)
    node = court.state.members[WORKER]
    assert node.credits == 0 and node.standing == "quarantined" and court.audit().findings == []


def test_leases_given_back_count_as_lapses_and_cost_the_same(court):
    court.work(WORKER, 2, by=JUDGES[0])
    for cost in (0, 20):
        before, lease = court.state.members[WORKER].credits, court.lease(WORKER)
        court.do(ReturnLeases(WORKER, (lease.id, lease.id, "no such"), court.now))
        assert before - court.state.members[WORKER].credits == cost
    assert court.state.members[WORKER].lapsed == 2 and court.audit().findings == []


def test_a_kicked_worker_is_not_brought_back_by_a_later_verdict(court):
    name = court.submit(WORKER, court.lease(WORKER))
    court.do(Admin("kick", AdminRequest(WORKER), court.now))
    for judge in JUDGES[:2]:
        court.judge(name, "hard", by=judge)
    court.tick(LAW.max_quarantine_s)
    assert court.state.members[WORKER].standing == "kicked"


def test_a_node_named_after_another_nodes_key_does_not_shield_that_node(court):
    court.do(JoinRun("b" * 64, Join("worker", WORKER, 0.0, "test", "float32", "cpu"), court.now))
    court.do(Admin("kick", AdminRequest(WORKER), court.now))
    assert [court.state.members[key].standing for key in (WORKER, "b" * 64)] == ["kicked", "new"]


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (0,), (0, 1, 1), ()])
def test_a_verdict_on_other_slots_than_the_leases_is_refused(court, order):
    name = court.submit(WORKER, court.lease(WORKER))
    slots = court.state.slots_of(court.state.leases[court.state.submissions[name].lease])
    groups = tuple(GroupVerdict(slots[i], True, "accept", rewards=(0.0,) * 4) for i in order)
    with pytest.raises(Refused, match="names every slot of the lease once, in order"):
        court.do(SubmitVerdict(JUDGES[0], Verdict(name, groups), court.now))


def test_the_verdict_of_an_idle_validator_decides_nothing(court):
    """Two verdicts find a forgery, but one did no work. One against one is a dispute, and nobody is slashed."""
    court.work(WORKER, 1, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER))
    court.judge(name, "hard", by=JUDGES[0])
    court.judge(name, "hard", by=JUDGES[1], differs_from=JUDGES[:1])
    entries = court.judge(name, "accept", by=JUDGES[2], differs_from=JUDGES[:1])
    (decision,) = bodies(entries, Decision)
    assert decision.disputed == decision.refused and not bodies(entries, Slash)
    assert [fault.validator for fault in bodies(entries, ValidatorFault)] == [JUDGES[0]]


def test_a_new_worker_gets_one_block_whatever_speed_it_claims(court):
    court.work(WORKER, 3, by=JUDGES[0])
    court.enter("b" * 64)
    court.do(AskLease("b" * 64, (), 1e9, court.now))
    (lease,) = court.state.open_leases_of("b" * 64)
    assert len(lease.blocks) == 1


def test_a_fast_worker_leaves_room_for_the_others(tmp_path):
    world = started(tmp_path, (WORKER, "b" * 64), JUDGES)
    for key in (WORKER, "b" * 64):
        world.serve(key, by=JUDGES[0], rewards=(1.0,) * 4)
    room = groups_wanted(world.state, world.state.main)
    world.do(AskLease(WORKER, (), 1e9, world.now))
    (lease,) = world.state.open_leases_of(WORKER)
    assert len(lease.blocks) * 2 == room // 2


def test_one_body_cannot_fill_two_leases(court):
    first = court.lease(WORKER)
    second = court.lease(WORKER, holding=[first.id])
    name = court.submit(WORKER, first)
    with pytest.raises(Refused, match="was sent for another lease already"):
        court.do(Submit(WORKER, second.id, name, 100, ("0" * 64,) * 2, (0.0,) * 2, (), court.now, int(court.now)))


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_a_submission_of_another_number_of_groups_is_malformed(court, groups):
    lease = court.lease(WORKER)
    with pytest.raises(Refused, match=f"has 2 slots, the submission {groups}"):
        court.do(
            Submit(
                WORKER, lease.id, "5" * 64, 100, ("0" * 64,) * groups, (0.0,) * groups, (), court.now, int(court.now)
            )
        )


def test_a_bug_halfway_through_a_command_leaves_the_state_of_the_log(court, monkeypatch):
    before = state_hash(court.state)

    def broken(_):
        monkeypatch.undo()
        raise ZeroDivisionError("a bug")

    async def scenario():
        monkeypatch.setattr("shoal.ledger.log.writer.consequent_events", broken)
        await court.log_writer.submit(JoinRun("1" * 64, Join("worker", "w", 0.0, "test", "float32", "cpu"), court.now))

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())
    assert state_hash(court.state) == before == state_hash(replay(court.log_writer.store.read()))


def test_a_link_is_not_published_while_a_submission_of_its_version_waits(tmp_path):
    world = started(tmp_path, (WORKER, "b" * 64), JUDGES, steps=20, max_staleness=1)
    waiting = world.submit(WORKER, world.lease(WORKER))
    while world.state.main.version < 3:
        world.serve("b" * 64, by=JUDGES[0])
        world.now += 20.0
        if world.state.main.version in world.state.main.batches:
            version = world.state.main.version + 1
            links = {v: ("00" * 32, "11" * 32) for v, kept in world.state.main.versions.items() if not kept.revealed}
            world.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", links, world.now))
    assert not world.state.main.versions[0].revealed and world.state.pending == [waiting]
    assert world.state.main.versions[1].revealed


def test_a_verdict_that_audits_more_than_was_drawn_is_refused(court):
    court.work(WORKER, 12, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), draw=0.9)
    with pytest.raises(Refused, match="was audited but not drawn for it"):
        court.judge(name, by=JUDGES[0], audited=True)


def test_the_validator_that_differs_from_two_that_agree_is_idle_in_any_order(tmp_path):
    for place, idle in enumerate(JUDGES):
        (tmp_path / idle[0]).mkdir()
        world = started(tmp_path / idle[0], WORKER, JUDGES, steps=200, max_staleness=50)
        name = world.submit(WORKER, world.lease(WORKER), recheck=0.0)
        found = []
        for number, judge in enumerate(JUDGES):
            differs = [other for other in JUDGES[:number] if idle in (judge, other)]
            outcome = "soft" if number == 1 else "accept"  # a third is asked
            found += bodies(world.judge(name, outcome, by=judge, differs_from=differs), ValidatorFault)
        assert idle in [fault.validator for fault in found if "without doing the work" in fault.cause], place


def test_nobody_is_blamed_if_two_of_three_validators_invent_their_projections(court):
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    for number, judge in enumerate(JUDGES):
        assert not bodies(court.judge(name, by=judge, differs_from=JUDGES[:number]), ValidatorFault)


def test_a_mild_cheat_found_by_a_recheck_costs_what_any_refusal_costs(court):
    court.work(WORKER, 3, by=JUDGES[0])
    name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(name, by=JUDGES[0])
    court.judge(name, "soft", by=JUDGES[1])
    entries = court.judge(name, "soft", by=JUDGES[2])
    assert [body.outcome for body in bodies(entries, Rechecked)] == ["refused"]
    assert [body.tokens for body in bodies(entries, Forfeited)] == [80] and court.audit().findings == []
    assert court.state.members[WORKER].valid_blocks == 0


@pytest.mark.parametrize("finds", ["soft", "hard"])
def test_each_third_mild_cheat_that_a_recheck_finds_quarantines_as_any_would(court, finds):
    """A friend accepts first. Hard findings of two kinds are no slash, but the first one quarantines."""
    node = court.state.members[WORKER]
    for times in (1, 2, 3):
        name = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
        court.judge(name, by=JUDGES[0])
        for audited, judge in enumerate(JUDGES[1:]):
            court.judge(name, finds, by=judge, audited=bool(audited))
        assert node.failures == times and (node.standing == "quarantined") == (finds == "hard" or times == 3)
        court.now = max(court.now, node.until + 1.0)
        court.do(Tick(court.now))
    assert court.audit().findings == []


@pytest.mark.parametrize(("outcome", "check"), [("hard", "[[["), ("soft", ""), ("void", "x"), ("accept", "shape")])
def test_a_refusal_names_one_of_the_runs_checks(court, outcome, check):
    submission = court.submit(WORKER, court.lease(WORKER))
    judge = next(key for key in JUDGES if submission in to_judge(court.state, key, court.now))
    with pytest.raises(Refused, match="names one of the run's checks"):
        court.judge(submission, outcome, by=judge, check=check)


def test_the_names_of_checks_in_the_rules_equal_those_of_the_checks():
    assert {check.name for check in (*MODEL_FREE, *AUDIT)} == set(CHECKS) - {REPLAY}


def test_a_fast_worker_gets_no_more_than_fits_into_its_messages(tmp_path):
    world = started(tmp_path, WORKER, batch_groups=4096, max_staleness=4, group_size=64, block_groups=64)
    world.serve(WORKER, rewards=(0.0, 1.0) * 32)
    world.do(AskLease(WORKER, (), 1e18, world.now))
    (lease,) = world.state.open_leases_of(WORKER)
    assert len(lease.blocks) == most_lease_blocks(world.state.rules, world.state.sampling, ()) < MAX_LEASE_BLOCKS

"""What is due at one tick is decided in one order, whatever the times at which each was due."""

import pytest

from shoal.ledger.commands import Admin, Reconfigure
from shoal.ledger.constants import LAW
from shoal.ledger.leases import LeaseLapsed
from shoal.ledger.members import NodeRestored
from shoal.ledger.verdicts import Decision, Rechecked
from shoal.protocol.messages import AdminRequest
from tests.ledger.ledger_fixture import started

WORKER, OTHER = "b" * 64, "a" * 64
JUDGES = ("d" * 64, "e" * 64, "f" * 64)


@pytest.fixture
def court(tmp_path):
    """A run with three validators and two workers, of which the second has the smaller key."""
    return started(tmp_path, (WORKER, OTHER), JUDGES, steps=200, max_staleness=50)


def test_leases_lapse_in_the_order_of_their_grants_whatever_their_deadlines(court):
    first = court.lease(WORKER)
    court.do(Reconfigure({"note": 1}, 0, 5.0, court.now))
    second = court.lease(OTHER)
    assert second.deadline < first.deadline
    assert court.tick(20.0)[:2] == [LeaseLapsed(first.id, "deadline"), LeaseLapsed(second.id, "deadline")]
    assert court.audit().findings == []


def test_leases_with_one_deadline_lapse_by_number_and_not_by_the_text_of_their_names(court):
    for _ in range(9):
        court.serve(WORKER, by=JUDGES[0])
        court.publish_if_due()
    ninth, tenth = court.lease(WORKER), court.lease(OTHER)
    assert (ninth.id, tenth.id, ninth.deadline) == ("9", "10", tenth.deadline)
    assert court.tick(20.0)[:2] == [LeaseLapsed("9", "deadline"), LeaseLapsed("10", "deadline")]


def test_overdue_submissions_end_oldest_first_and_before_rechecks(court):
    looked_at_again = court.submit(WORKER, court.lease(WORKER), recheck=0.0)
    court.judge(looked_at_again, by=JUDGES[0])
    court.now += 1.0
    names = [court.submit(key, court.lease(key)) for key in (WORKER, OTHER)]
    for name in reversed(names):
        court.now += 1.0
        court.judge(name, "soft", by=JUDGES[0])
    assert court.state.rechecks == [looked_at_again] and court.state.pending == names
    ended = [court.tick(LAW.dispute_s)[0], court.tick(0.0)[0], court.tick(0.0)[0]]
    assert [type(body) for body in ended] == [Decision, Decision, Rechecked]
    assert [body.submission for body in ended] == [*names, looked_at_again]
    assert court.audit().findings == []


def test_quarantines_end_in_the_order_in_which_the_nodes_joined(court):
    for key in (OTHER, WORKER):
        court.judge(court.submit(key, court.lease(key)), "hard", by=JUDGES[0])
        court.now += 1.0
    assert court.tick(100.0) == [NodeRestored(WORKER), NodeRestored(OTHER)]
    assert court.audit().findings == []


def test_the_quarantine_of_a_removed_node_is_not_due_any_more(court):
    court.judge(court.submit(WORKER, court.lease(WORKER)), "hard", by=JUDGES[0])
    assert [whose for _, what, whose in court.state.due if what == "quarantine"] == [WORKER]
    court.do(Admin("kick", AdminRequest(WORKER), court.now))
    assert [whose for _, what, whose in court.state.due if what == "quarantine"] == []
    assert court.tick(100.0) == [] and court.state.members[WORKER].standing == "kicked"
    assert court.audit().findings == []

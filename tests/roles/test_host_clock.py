"""What nodes and auditors notice of a host that moves its clock."""

import asyncio

import msgspec
import pytest

from shoal.errors import PeerError, fault_of_user
from shoal.ledger.commands import Tick
from shoal.ledger.errors import Wait
from shoal.ledger.leases import LeaseLapsed
from shoal.protocol import messages as t
from shoal.protocol.encoding import to_json
from shoal.roles.auditor.rejudge_groups import GroupChoice, audit_rollouts
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.coordinator.status import StatusCache
from shoal.runs.log_source import FolderRun
from tests.roles.forgery import bodies
from tests.roles.testbed import RunTestbed, tiny_run

HOUR_S = 3600.0


@pytest.fixture
def testbed(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run(steps=1))


def fault_of_worker(testbed):
    """The error with which the only worker leaves."""
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("victim")))
    return fault_of_user(ended.value)


def test_a_worker_gives_back_a_lease_from_the_future_and_leaves(testbed):
    honest = testbed.coordinator.wire_lease
    testbed.coordinator.wire_lease = lambda lease: msgspec.structs.replace(honest(lease), issued=lease.issued + HOUR_S)
    fault = fault_of_worker(testbed)
    assert isinstance(fault, PeerError) and "s ahead of this machine's clock (limit 90), so leases end early" in str(
        fault
    )
    assert [body.cause for _, body in bodies(testbed.folder.root) if isinstance(body, LeaseLapsed)] == ["returned"]


def test_a_worker_keeps_a_receipt_from_the_future_as_evidence_and_leaves(testbed):
    """The host shows the log's true time to others: the receipt then contradicts the log."""

    def receipt_of(name):
        booked = testbed.coordinator.state.submissions[name]
        receipt = t.Receipt(
            testbed.coordinator.state.run, booked.lease, name, booked.seq, booked.head, booked.time + HOUR_S, ""
        )
        return msgspec.structs.replace(receipt, signature=testbed.coordinator.key.sign("receipt", to_json(receipt)))

    testbed.coordinator._receipt = receipt_of
    assert "s ahead of this machine's clock" in str(fault_of_worker(testbed))
    (finding,) = audit_folder(testbed.folder.root).findings
    assert "is signed for the time" in finding
    evidence = GroupChoice(evidence=(testbed.folder.nodes / "victim",))
    found = asyncio.run(audit_rollouts(FolderRun(testbed.folder.root), evidence, threads=1, own_files=True))
    assert [line for line in found.disagreements if "is signed for the time" in line]


@pytest.mark.parametrize(("ahead_s", "waits"), [(25.0, False), (40.0, True)])
def test_after_its_clock_was_set_back_a_host_grants_no_lease_until_its_log_is_reached(testbed, ahead_s, waits):
    """Otherwise honest workers would take it for a host that moved its clock."""
    now = testbed.clock()
    testbed.coordinator.log_writer.write(Tick(now), now)
    testbed.coordinator.state.time = now + ahead_s  # of the newest event, before the clock was set back
    with pytest.raises(Exception) as refusal:
        asyncio.run(testbed.coordinator.lease("a" * 64, t.LeaseRequest()))
    assert (isinstance(refusal.value, Wait) and "ahead of the host's clock" in str(refusal.value)) == waits
    assert ("1 min ahead of the host's clock" in StatusCache(testbed.coordinator).status().waiting_for) == waits


def test_a_run_goes_on_after_its_hosts_clock_was_set_back_by_two_seconds(tmp_path):
    """Time synchronisation does that. Nobody is charged, and the log has no finding."""
    set_back = {"s": 0.0}
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=2))
    clock = testbed.coordinator.clock
    testbed.coordinator.clock = lambda: clock() - set_back["s"]

    async def scenario():
        async with asyncio.TaskGroup() as group:
            group.create_task(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("honest")))
            while testbed.coordinator.state.main.version < 1:
                await asyncio.sleep(0.01)
            set_back["s"] = 2.0

    asyncio.run(scenario())
    assert audit_folder(testbed.folder.root).findings == [] and testbed.coordinator.state.main.version == 2
    times = [time for time, _ in bodies(testbed.folder.root)]
    assert times == sorted(times)
    assert all(member.lapsed == member.refused == 0 for member in testbed.coordinator.state.members.values())

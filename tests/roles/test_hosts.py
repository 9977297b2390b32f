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
from shoal.roles.auditor.recompute import GroupChoice, audit_rollouts
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.coordinator.status import StatusBoard
from shoal.runs.public_run import FolderRun
from tests.roles.forgery import bodies
from tests.roles.in_memory_run import Town, tiny_run

HOUR_S = 3600.0


@pytest.fixture
def town(tmp_path):
    return Town(tmp_path / "run", tiny_run(steps=1))


def fault_of_worker(town):
    """The error with which the only worker leaves."""
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(town.live(town.trainer(), town.validator(), town.worker("victim")))
    return fault_of_user(ended.value)


def test_a_worker_gives_back_a_lease_from_the_future_and_leaves(town):
    honest = town.desk.wire_lease
    town.desk.wire_lease = lambda lease: msgspec.structs.replace(honest(lease), issued=lease.issued + HOUR_S)
    fault = fault_of_worker(town)
    assert isinstance(fault, PeerError) and "s ahead of this machine's clock (limit 90), so leases end early" in str(
        fault
    )
    assert [body.cause for _, body in bodies(town.folder.root) if isinstance(body, LeaseLapsed)] == ["returned"]


def test_a_worker_keeps_a_receipt_from_the_future_as_evidence_and_leaves(town):
    """The host shows the log's true time to others: the receipt then contradicts the log."""

    def receipt_of(name):
        booked = town.desk.state.submissions[name]
        receipt = t.Receipt(town.desk.state.run, booked.lease, name, booked.seq, booked.head, booked.time + HOUR_S, "")
        return msgspec.structs.replace(receipt, signature=town.desk.key.sign("receipt", to_json(receipt)))

    town.desk._receipt = receipt_of
    assert "s ahead of this machine's clock" in str(fault_of_worker(town))
    (finding,) = audit_folder(town.folder.root).findings
    assert "is signed for the time" in finding
    evidence = GroupChoice(evidence=(town.folder.nodes / "victim",))
    found = asyncio.run(audit_rollouts(FolderRun(town.folder.root), evidence, threads=1, own_files=True))
    assert [line for line in found.disagreements if "is signed for the time" in line]


@pytest.mark.parametrize(("ahead_s", "waits"), [(25.0, False), (40.0, True)])
def test_after_its_clock_was_set_back_a_host_grants_no_lease_until_its_log_is_reached(town, ahead_s, waits):
    """Otherwise honest workers would take it for a host that moved its clock."""
    now = town.clock()
    town.desk.book.write(Tick(now), now)
    town.desk.state.time = now + ahead_s  # of the newest event, before the clock was set back
    with pytest.raises(Exception) as refusal:
        asyncio.run(town.desk.lease("a" * 64, t.LeaseRequest()))
    assert (isinstance(refusal.value, Wait) and "ahead of the host's clock" in str(refusal.value)) == waits
    assert ("1 min ahead of the host's clock" in StatusBoard(town.desk).status().waiting_for) == waits


def test_a_run_goes_on_after_its_hosts_clock_was_set_back_by_two_seconds(tmp_path):
    """Time synchronisation does that. Nobody is charged, and the log has no finding."""
    set_back = {"s": 0.0}
    town = Town(tmp_path / "run", tiny_run(steps=2))
    clock = town.desk.clock
    town.desk.clock = lambda: clock() - set_back["s"]

    async def story():
        async with asyncio.TaskGroup() as group:
            group.create_task(town.live(town.trainer(), town.validator(), town.worker("honest")))
            while town.desk.state.main.version < 1:
                await asyncio.sleep(0.01)
            set_back["s"] = 2.0

    asyncio.run(story())
    assert audit_folder(town.folder.root).findings == [] and town.desk.state.main.version == 2
    times = [time for time, _ in bodies(town.folder.root)]
    assert times == sorted(times)
    assert all(member.lapsed == member.refused == 0 for member in town.desk.state.members.values())

"""What the digest of the log says of single events."""

from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.event import Entry
from shoal.ledger.leases import LeaseGranted, LeaseLapsed
from shoal.ledger.submissions import SubmissionReceived
from shoal.ledger.versions import CheckpointPublished
from shoal.monitors.step_statistics import Digest

QUICK, SLOW = "a" * 64, "b" * 64


def told(*events):
    """A digest of events, each with its time."""
    digest = Digest()
    for seq, (time, body) in enumerate(events):
        digest.see(Entry(seq, time, "", body, b"", ""))
    return digest


def leased(time, worker, block, lease):
    return time, LeaseGranted(lease, worker, 0, (block,), time + 60.0)


def made(time, worker, block, lease):
    """A block of one group that is sent and accepted."""
    yield time, SubmissionReceived(lease, worker, lease * 64, 100, ("0" * 64,), int(time))
    yield time, GroupAccepted(0, block, lease * 64, 0, "0" * 64, 50, (1.0, 0.0), True)


def published(time):
    return time, CheckpointPublished(0, "0" * 64, "", 0)


def test_a_batch_waits_for_whom_its_last_block_was_leased_to_first():
    start = [published(100.0), leased(100.0, QUICK, 0, "1"), leased(100.0, SLOW, 1, "2")]
    own = told(
        *start, *made(103.0, QUICK, 0, "1"), *made(110.0, SLOW, 1, "2"), (110.0, BatchFormed(0, ((0, 0), (0, 1))))
    )
    assert (own.now.of(SLOW).held_s, own.now.of(QUICK).held_s) == (7.0, 0.0)

    retaken = [leased(105.0, QUICK, 1, "3"), *made(108.0, QUICK, 1, "3")]
    by_another = told(*start, *made(103.0, QUICK, 0, "1"), *retaken, (108.0, BatchFormed(0, ((0, 0), (0, 1)))))
    assert (by_another.now.of(SLOW).held_s, by_another.now.of(QUICK).held_s) == (5.0, 0.0)


def test_a_block_that_was_there_before_the_version_held_up_nobody():
    early = [
        leased(90.0, QUICK, 0, "1"),
        leased(90.0, SLOW, 1, "2"),
        *made(91.0, QUICK, 0, "1"),
        *made(99.0, SLOW, 1, "2"),
    ]
    digest = told(*early, published(100.0), (100.0, BatchFormed(0, ((0, 0), (0, 1)))))
    assert digest.now.of(SLOW).held_s == 0.0


def test_lapses_for_a_stopped_environment_are_counted_apart():
    gone = [(30.0, LeaseLapsed("1", "stopped")), (31.0, LeaseLapsed("2", "deadline"))]
    node = told(leased(10.0, "a", 0, "1"), leased(20.0, "a", 1, "2"), *gone).now.of("a")
    assert (node.lapsed, node.stopped) == (2, 1)


def test_whose_open_leases_are_the_oldest_is_known():
    digest = told(
        leased(10.0, "a", 0, "one"), leased(20.0, "b", 1, "two"), leased(30.0, "b", 2, "three"), *made(40.0, "a", 0, "one")
    )  # fmt: skip
    assert digest.longest_leased() == (("b", 20.0),)

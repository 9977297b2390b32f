"""Logs of a lying host, made by hand: every hash fits, and a finding names each event that no log may hold."""

import msgspec
import pytest

from shoal.errors import StateError
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.constants import LAW
from shoal.ledger.event import GENESIS
from shoal.ledger.event_types import make_entry, read_entry
from shoal.ledger.leases import LeaseGranted
from shoal.ledger.log.check import verify
from shoal.ledger.pay import Credit, Forfeited, Slash, Vested
from shoal.ledger.submissions import AuditDrawn, SubmissionReceived
from shoal.ledger.verdicts import Decision, VerdictGiven
from shoal.ledger.versions import CheckpointPublished, LinkRevealed
from shoal.protocol.algorithm_config import Composition, Vine
from shoal.protocol.constants import CHAIN_LENGTH, MAX_LEASE_BLOCKS
from shoal.protocol.encoding import WireError
from shoal.protocol.seed_chain import AUDIT_CHAIN, SLOT_CHAIN, SecretChain
from tests.ledger.ledger_fixture import VALIDATOR, rules, started

WORKER = "a" * 64


@pytest.mark.parametrize(
    "sizes",
    [
        {"block_groups": 0},
        {"block_groups": 1025},
        {"group_size": 0},
        {"group_size": 10**9},
        {"algorithm": Composition(credit=Vine(continuations=0))},
        {"algorithm": Composition(credit=Vine(every=0))},
        {"algorithm": Composition(credit=Vine(most=10**9))},
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_log_of_groups_or_blocks_that_cannot_be_is_not_read(lines, sizes, first):
    """Whoever reads it would count to their number: the groups of a refused block fill the memory. A log can hold the event
    that a run begins with anywhere."""
    time, created = lines[0]
    other = time, msgspec.structs.replace(created, rules=rules(**sizes))
    with pytest.raises(
        (StateError, WireError), match=r"the log's rules have groups of fewer than 1|Expected `int` >= 1"
    ):
        verify(rows_of([other, *lines[1:]] if first else [*lines[:3], other, *lines[3:]]))


def test_a_log_with_a_lease_of_more_blocks_than_any_run_grants_is_not_read(lines):
    """All who read a lease list its groups."""
    at = next(i for i, (_, body) in enumerate(lines) if isinstance(body, LeaseGranted))
    many = msgspec.structs.replace(lines[at][1], blocks=tuple(range(MAX_LEASE_BLOCKS + 1)))
    with pytest.raises(WireError, match="length <= 64"):
        rows_of([*lines[:at], (lines[at][0], many)])


def test_groups_of_blocks_that_are_refused_for_their_noise_are_counted_and_not_listed(lines, monkeypatch):
    """A log may hold such a decision of any number of blocks."""
    place = next(i for i, (_, body) in enumerate(lines) if isinstance(body, VerdictGiven))
    world_lines = [(time, body) for time, body in lines[:place]]
    name, lease = lines[place][1].submission, next(body for _, body in lines if isinstance(body, LeaseGranted))
    world_lines.append((lines[place][0], Decision(name, (), lease.blocks)))
    assert verify(rows_of(world_lines)).state.members[WORKER].reasons == {"sampling": 2 * len(lease.blocks)}


@pytest.mark.parametrize(
    "wrong", [{"max_staleness": -1}, {"worker_share": 1.1}, {"lease_s": 0.0}, {"audit_rate": -0.1}], ids=str
)
def test_a_log_whose_rules_no_run_file_could_ask_for_is_not_read(lines, wrong):
    time, created = lines[0]
    with pytest.raises(WireError, match=f"at `\\$.rules.{next(iter(wrong))}`"):
        rows_of([(time, msgspec.structs.replace(created, rules=rules(**wrong)))])


@pytest.fixture
def lines(tmp_path):
    """(time, body) of each event of an honest run that ends with its first batch."""
    world = started(tmp_path, WORKER)
    for _ in range(2):
        world.serve(WORKER)
    assert world.audit().findings == []
    entries = [read_entry(data)[0] for data, _ in world.log_writer.store.read()]
    assert isinstance(entries[-1].body, BatchFormed)
    return [(entry.time, entry.body) for entry in entries]


def rows_of(lines):
    """Stored rows of these events, with hashes that fit each other."""
    rows, head = [], GENESIS
    for seq, (time, body) in enumerate(lines):
        entry = make_entry(seq, time, body, head)
        rows.append((entry.data, entry.hash))
        head = entry.hash
    return rows


def findings(lines):
    return verify(rows_of(lines)).findings


def place(lines, kind):
    return next(i for i, (_, body) in enumerate(lines) if isinstance(body, kind))


def twice(*kinds):
    """Repeats the first event of each kind."""

    def edit(lines):
        for kind in kinds:
            at = place(lines, kind)
            lines = [*lines[: at + 1], *lines[at:]]
        return lines

    return edit


def edited(kind, **fields):
    def edit(lines):
        at = place(lines, kind)
        return [*lines[:at], (lines[at][0], msgspec.structs.replace(lines[at][1], **fields)), *lines[at + 1 :]]

    return edit


def ended_by(body):
    return lambda lines: [*lines, (lines[-1][0], body)]


def used_again(lines):
    return [*lines, (lines[-1][0], BatchFormed(1, lines[-1][1].groups))]


HELD = {
    "a group paid twice": (twice(Credit), "accepted 1 times, paid 2 times"),
    "a group used twice": (used_again, "used 2 times, accepted 1"),
    "a group used too late": (edited(BatchFormed, step=2), "used version 0 slot 0, which is 2 versions old, limit 1"),
    "pay vested that is not there": (ended_by(Vested(WORKER, 0, 7)), "has 40 credits, but 7 vested and 40 not"),
    "a submission received twice": (twice(SubmissionReceived, AuditDrawn), "is in the log 2 times"),
    "a submission decided twice": (twice(SubmissionReceived, AuditDrawn, Decision), "was decided 2 times"),
}


@pytest.mark.parametrize("forgery", HELD)
def test_an_event_that_no_log_may_hold_is_named(lines, forgery):
    edit, named = HELD[forgery]
    assert any(named in finding for finding in findings(edit(lines)))


LED_TO = {
    "a decision against its verdict": (
        edited(Decision, accepted=(), refused=(0,)),
        "(decision) is not what the rules",
    ),
    "a group that taught something left out": (
        edited(GroupAccepted, signal=False),
        "(group_accepted) is not what the rules give here: signal is False, not True",
    ),
    "a credit from nowhere": (ended_by(Credit(WORKER, 0, 9, 5)), "(credit) follows from nothing before it"),
    "a worker's word on its own work": (
        edited(VerdictGiven, validator=WORKER),
        "(verdict_given) is against the rules",
    ),
    "an end that never came": (lambda lines: lines[:-1], "the log ends in the middle of what its last event led to"),
    "a long deadline": (edited(LeaseGranted, deadline=1e9), "(lease_granted) is not what the rules give here"),
}


@pytest.mark.parametrize("forgery", LED_TO)
def test_an_event_that_the_rules_do_not_lead_to_is_named(lines, forgery):
    edit, named = LED_TO[forgery]
    assert any(named in finding for finding in findings(edit(lines)))


def test_an_event_rewritten_with_its_own_hash_breaks_the_chain(lines):
    rows = rows_of(lines)
    entry, prev = read_entry(rows[5][0])
    other = make_entry(entry.seq, entry.time + 1.0, entry.body, prev)
    with pytest.raises(StateError, match="broken at event 6"):
        verify([*rows[:5], (other.data, other.hash), *rows[6:]])


def test_an_edit_of_the_last_event_is_found_although_none_follows(lines):
    *rows, (data, name) = rows_of(lines)
    with pytest.raises(StateError, match="broken at event"):
        verify([*rows, (data.replace(b"1000.0", b"1001.0"), name)])


def test_a_link_that_does_not_lead_to_the_published_end_is_named(lines):
    found = findings(ended_by(LinkRevealed(0, "ab" * 32, "cd" * 32))(lines))
    assert any("does not lead to the published end" in finding for finding in found)


@pytest.mark.parametrize("far", [CHAIN_LENGTH, 1 << 60])
def test_a_link_further_away_than_the_chain_is_long_is_named_at_once(lines, far):
    """2^60 steps take for ever, so links of longer chains lead nowhere, even if they do."""
    slots, audits = (SecretChain(b"s", purpose, CHAIN_LENGTH + 1).links() for purpose in (SLOT_CHAIN, AUDIT_CHAIN))
    (time, created), *rest = lines
    ends = msgspec.structs.replace(created, chain_end=slots[0].hex(), audit_chain_end=audits[0].hex())
    link = LinkRevealed(far, slots[-1].hex(), audits[-1].hex())
    published = CheckpointPublished(far, "ab" * 32, "cd" * 32)
    found = findings([(time, ends), *rest, (rest[-1][0], published), (rest[-1][0], link)])
    assert f"the link revealed for version {far} does not lead to the published end" in found


def test_books_that_do_not_balance_are_named(lines, monkeypatch):
    """No event can do that, only a bug of the replay, such as pay that is taken but not counted as burned."""

    def forgetful(state, node, tokens):
        node.credits -= tokens

    monkeypatch.setattr("shoal.ledger.pay.remove_credits", forgetful)
    name = lines[place(lines, SubmissionReceived)][1].digest
    found = findings(ended_by(Slash(WORKER, name, 40))(lines))
    assert any("balances sum to 0 and 0 are burned, issued are 40" in finding for finding in found)


# --- a law of the host's own ---


def test_a_law_of_the_hosts_own_is_named_with_each_constant(tmp_path):
    own = msgspec.structs.replace(LAW, refused_blocks=10**6, recheck_rate=0.0, max_quarantine_s=1e12)
    world = started(tmp_path, WORKER, law=own)
    world.serve(WORKER)
    assert world.audit().findings == [
        "the law differs from the project's in recheck_rate = 0.0, not 0.05; refused_blocks = 1000000, not 8; "
        "max_quarantine_s = 1000000000000.0, not 3600.0: the host chose constants of its own"
    ]


# --- draws whose link is still secret ---


def drawn(change):
    """The first `audit_drawn`, changed; that of a version whose link is not revealed."""

    def edit(lines):
        at = place(lines, AuditDrawn)
        return [*lines[:at], (lines[at][0], change(lines[at][1])), *lines[at + 1 :]]

    return edit


SECRET = {
    "pay taken in its place": (
        lambda lines: drawn(lambda body: Forfeited(WORKER, "0", 0, 0, "refused"))(lines),
        "(forfeited) is not what the rules give here: due is audit_drawn",
    ),
    "another rate": (
        edited(AuditDrawn, rate=0.5),
        "(audit_drawn) is not what the rules give here: rate is 0.5, not 1.0",
    ),
    "slots that the draws spare": (edited(AuditDrawn, slots=(0,)), "(audit_drawn) is not what the rules give here"),
    "a draw too few": (drawn(lambda body: msgspec.structs.replace(body, draws=body.draws[1:])), "(ValueError)"),
    "a judge that is none": (
        edited(AuditDrawn, order=(WORKER,)),
        "(audit_drawn) is not what the rules give here: order",
    ),
}


@pytest.mark.parametrize("forgery", SECRET)
def test_what_follows_a_submission_is_decided_again_while_its_link_is_secret(secret_lines, forgery):
    edit, named = SECRET[forgery]
    assert findings(secret_lines) == []
    assert any(named in finding for finding in findings(edit(secret_lines)))


@pytest.fixture
def secret_lines(tmp_path):
    """(time, body) of each event of a run with one submission whose validator has a turn."""
    world = started(tmp_path, WORKER)
    world.judge(world.submit(WORKER, world.lease(WORKER), order=(VALIDATOR,)))
    return [(entry.time, entry.body) for entry in world.audit().entries]


# --- numbers that break the arithmetic of the rules ---


def test_rules_that_no_arithmetic_can_follow_are_a_finding(tmp_path):
    changes, fault = {"batch_groups": 10**400}, "OverflowError"
    world = started(tmp_path, WORKER)
    world.lease(WORKER)
    created, *rest = [(entry.time, entry.body) for entry in world.audit().entries]
    broken = msgspec.structs.replace(created[1], rules=rules(**changes))
    assert any(fault in finding for finding in findings([(created[0], broken), *rest]))

"""The rules of a run, tried by a small honest world: a clock that is a number, nodes that are keys, no network."""

import random

import pytest

from shoal.errors import StateError
from shoal.ledger import events as ev
from shoal.ledger.book import Book
from shoal.ledger.commands import Admin, AskLease, Create, Enter, Judge, Publish, Refused, Submit, Tick, Wait
from shoal.ledger.decide import slots_of
from shoal.ledger.state import state_hash
from shoal.ledger.store import Store, sqlite_url
from shoal.ledger.verify import verify
from shoal.protocol.types import GroupVerdict, Join, Receipt, Rules, Sampling, Verdict
from shoal.protocol.wire import digest

TRAINER, VALIDATOR = "t" * 64, "v" * 64


def rules(**changes):
    values = dict(
        group_size=4, block_groups=2, batch_groups=4, max_staleness=1, steps=5, lease_s=10.0, audit_rate=1.0,
        dtype="float32", logprob_bound=0.01, gap_bound=1e-3, max_flipped=0.01, mean_gap_bound=1e-4,
    )  # fmt: skip
    return Rules(**(values | changes))


class World:
    """A book with a clock and honest moves, so that a test says only what it is about."""

    def __init__(self, tmp_path, **changes):
        self.path, self.now = tmp_path / "log.sqlite", 1000.0
        self.book = Book(Store(sqlite_url(self.path)))
        created = ev.RunCreated(
            "r" * 32, "test", "k" * 64, TRAINER, (VALIDATOR,), "00" * 32, "11" * 32, (), Sampling(1.0, 8, 64),
            rules(**changes), {"verify": {"quarantine_s": 30.0}},
        )  # fmt: skip
        self.do(Create(created, self.now))
        self.enter(TRAINER, "trainer")
        self.enter(VALIDATOR, "validator")

    @property
    def state(self):
        return self.book.state

    def do(self, command):
        return self.book.write(command, self.now)

    def enter(self, key, role="worker"):
        return self.do(Enter(key, Join(role, key[:6], 0.0, "test", "float32", "cpu"), self.now))

    def publish(self, version=None):
        version = self.state.version + 1 if version is None else version
        return self.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", {}, self.now))

    def lease(self, key, holding=()):
        self.do(AskLease(key, tuple(holding), 0.0, self.now))
        return next(lease for lease in self.state.open_leases_of(key) if lease.id not in holding)

    def submit(self, key, lease, salt=""):
        groups = tuple(digest(f"{lease.id}/{i}/{salt}".encode()) for i in range(len(slots_of(self.state, lease))))
        name = digest("".join(groups).encode())
        self.do(Submit(key, lease.id, name, 100, groups, tuple(0.0 for _ in groups), self.now))
        return name

    def judge(self, submission, outcome="accept", rewards=(0.0, 1.0, 0.0, 1.0)):
        lease = self.state.leases[self.state.submissions[submission].lease]
        accepted = outcome == "accept"
        groups = tuple(
            GroupVerdict(
                slot,
                True,
                outcome,
                "" if accepted else "sampling",
                "why",
                rewards=rewards if accepted else (),
                tokens=10 if accepted else 0,
            )
            for slot in slots_of(self.state, lease)
        )
        return self.do(Judge(VALIDATOR, Verdict(submission, groups), self.now))

    def serve(self, key, **how):
        lease = self.lease(key)
        self.judge(self.submit(key, lease), **how)
        return lease

    def audit(self, receipts=()):
        return verify(self.book.store.read(), receipts)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    world.enter("a" * 64)
    world.publish()
    return world


def test_accepted_groups_are_paid_and_fill_a_batch(world):
    world.serve("a" * 64)
    world.serve("a" * 64)
    assert world.state.batches == {0: ((0, 0), (0, 1), (0, 2), (0, 3))}
    assert world.state.nodes["a" * 64].credits == 40
    assert world.audit().findings == []


def test_a_group_without_signal_is_paid_but_does_not_fill_a_batch(world):
    world.serve("a" * 64, rewards=(1.0, 1.0, 1.0, 1.0))
    world.serve("a" * 64)
    assert world.state.batches == {}
    assert world.state.nodes["a" * 64].credits == 40


def test_asking_again_returns_the_open_lease(world):
    first = world.lease("a" * 64)
    before = world.state.seq
    assert world.lease("a" * 64) is first
    assert world.state.seq == before


def test_a_worker_may_prefetch_one_lease_and_no_more(world):
    first = world.lease("a" * 64)
    second = world.lease("a" * 64, holding=[first.id])
    assert second.id != first.id
    with pytest.raises(Wait):
        world.do(AskLease("a" * 64, (first.id, second.id), 0.0, world.now))


def test_no_more_is_leased_than_staleness_allows(world):
    for letter in "abcdef":
        world.enter(letter * 64)
    leased = 0
    for letter in "abcdef":
        try:
            leased += len(world.lease(letter * 64).blocks) * 2
        except Wait:
            break
    assert leased == 8, "max_staleness + 1 = 2 batches of 4 groups"


def test_sending_twice_changes_nothing_and_another_digest_conflicts(world):
    lease = world.lease("a" * 64)
    world.submit("a" * 64, lease)
    before = state_hash(world.state)
    world.submit("a" * 64, lease)
    assert state_hash(world.state) == before
    with pytest.raises(Refused, match="filled"):
        world.submit("a" * 64, lease, salt="other")


def test_a_lapsed_block_is_leased_again_with_the_same_slots(world):
    world.enter("b" * 64)
    lost = world.lease("a" * 64)
    world.now += 11
    world.do(Tick(world.now))
    again = world.lease("b" * 64)
    assert again.blocks == lost.blocks and again.version == lost.version
    with pytest.raises(Refused, match="leased again"):
        world.submit("a" * 64, lost)


def test_an_honest_slow_worker_passes_when_nobody_took_its_block(world):
    lease = world.lease("a" * 64)
    world.now += 11
    world.do(Tick(world.now))
    assert world.state.nodes["a" * 64].lapsed == 1
    world.judge(world.submit("a" * 64, lease))
    assert world.state.nodes["a" * 64].credits == 20
    assert world.state.free == []


def test_a_submission_for_a_version_too_old_is_superseded(world):
    slow = world.lease("a" * 64)
    world.enter("b" * 64)
    for _ in range(2):
        while len(world.state.batches) <= world.state.version:
            world.serve("b" * 64)
        world.publish()
    with pytest.raises(Refused, match="too old"):
        world.submit("a" * 64, slow)


def test_another_worker_cannot_fill_a_lease(world):
    world.enter("b" * 64)
    lease = world.lease("a" * 64)
    with pytest.raises(Refused, match="not one of yours"):
        world.submit("b" * 64, lease)


def test_a_hard_refusal_pays_nothing_quarantines_and_gives_the_block_back(world):
    lease = world.serve("a" * 64, outcome="hard")
    node = world.state.nodes["a" * 64]
    assert (node.credits, node.standing, node.refused, node.reasons) == (0, "quarantined", 2, {"sampling": 2})
    assert world.state.free == [(0, lease.blocks[0])]
    with pytest.raises(Wait, match="quarantined"):
        world.lease("a" * 64)
    world.now += 31
    world.do(Tick(world.now))
    assert world.lease("a" * 64).blocks == lease.blocks


def test_quarantine_grows_with_each_failure(world):
    waits = []
    for _ in range(3):
        world.serve("a" * 64, outcome="hard")
        waits.append(world.state.nodes["a" * 64].until - world.now)
        world.now += waits[-1] + 1
        world.do(Tick(world.now))
    assert waits == [30.0, 60.0, 120.0]


def test_one_soft_refusal_costs_only_the_pay(world):
    world.serve("a" * 64, outcome="soft")
    assert world.state.nodes["a" * 64].standing == "new"
    assert world.state.nodes["a" * 64].credits == 0


def test_only_admitted_validators_judge(world):
    world.enter("a" * 64)
    with pytest.raises(Refused, match="not admitted"):
        world.enter("e" * 64, "validator")
    with pytest.raises(Refused, match="no public key"):
        world.do(Admin("admit", "3f2a", world.now))
    world.do(Admin("admit", "e" * 64, world.now))
    world.enter("e" * 64, "validator")


def test_a_verdict_must_audit_what_was_drawn(world):
    lease = world.lease("a" * 64)
    name = world.submit("a" * 64, lease)
    lazy = tuple(GroupVerdict(s, False, "accept", rewards=(0.0, 1.0, 0.0, 1.0)) for s in slots_of(world.state, lease))
    with pytest.raises(Refused, match="drawn for audit"):
        world.do(Judge(VALIDATOR, Verdict(name, lazy), world.now))


def test_a_version_is_published_once(world):
    before = world.state.seq
    world.publish(0)
    assert world.state.seq == before
    with pytest.raises(Refused, match="published once"):
        world.do(Publish(TRAINER, 0, digest(b"other"), "m", {}, world.now))
    with pytest.raises(Refused, match="needs batch 0"):
        world.publish(1)


def test_synchronous_batches_go_by_slot_number_whatever_the_order(tmp_path):
    world = World(tmp_path, max_staleness=0, steps=2)
    for letter in "ab":
        world.enter(letter * 64)
    world.publish()
    first, second = world.lease("a" * 64), world.lease("b" * 64)
    world.judge(world.submit("b" * 64, second))
    assert world.state.batches == {}
    world.judge(world.submit("a" * 64, first), rewards=(1.0, 1.0, 1.0, 1.0))
    assert world.state.batches == {}, "two flat groups leave only two with signal"
    world.serve("a" * 64)
    assert world.state.batches[0] == ((0, 2), (0, 3), (0, 4), (0, 5))


def test_a_paused_run_gives_no_leases_and_a_kicked_node_none_either(world):
    world.do(Admin("pause", "", world.now))
    with pytest.raises(Wait, match="paused"):
        world.lease("a" * 64)
    world.do(Admin("resume", "", world.now))
    world.do(Admin("kick", "a" * 6, world.now))
    with pytest.raises(Refused, match="removed"):
        world.lease("a" * 64)


def test_a_draining_run_finishes_what_is_out_and_ends(world):
    name = world.submit("a" * 64, world.lease("a" * 64))
    world.do(Admin("drain", "", world.now))
    with pytest.raises(Wait, match="draining"):
        world.lease("a" * 64)
    assert world.state.phase == "draining"
    world.judge(name)
    assert world.state.phase == "ended" and world.state.nodes["a" * 64].credits == 20


def test_the_run_ends_at_its_last_step(world):
    while world.state.phase != "ended":
        while len(world.state.batches) <= world.state.version:
            world.serve("a" * 64)
        world.publish()
    assert world.state.version == 5
    assert world.audit().findings == []


def test_replay_gives_the_same_state_and_an_edit_is_found(world):
    world.serve("a" * 64)
    rows = list(world.book.store.read())
    assert state_hash(verify(rows).state) == state_hash(world.state)
    data, name = rows[5]
    for edited in (rows[:5] + rows[6:], [*rows[:5], (data.replace(b"1", b"2", 1), name), *rows[6:]]):
        with pytest.raises(StateError, match="broken"):
            verify(edited)


def test_a_receipt_that_the_log_does_not_hold_is_found(world):
    lease = world.lease("a" * 64)
    name = world.submit("a" * 64, lease)
    kept = world.state.submissions[name]
    honest = Receipt("r" * 32, lease.id, name, kept.seq, kept.head, kept.time, "")
    assert world.audit([honest]).findings == []
    lost = Receipt("r" * 32, lease.id, digest(b"never stored"), 7, "0" * 64, 0.0, "")
    forked = Receipt("r" * 32, lease.id, name, kept.seq, "0" * 64, kept.time, "")
    assert any("lost" in finding for finding in world.audit([lost]).findings)
    assert any("fork" in finding for finding in world.audit([forked]).findings)


def test_a_failed_commit_leaves_memory_as_the_disk(world, monkeypatch):
    lease = world.lease("a" * 64)
    before = state_hash(world.state)

    def full_disk(entries):
        raise StateError("the log could not be written: database or disk is full")

    monkeypatch.setattr(world.book.store, "append", full_disk)
    with pytest.raises(StateError):
        world.submit("a" * 64, lease)
    assert state_hash(world.state) == before
    monkeypatch.undo()
    world.submit("a" * 64, lease)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_any_order_of_moves_keeps_the_books_balanced(tmp_path, seed, staleness):
    """A random crowd of honest, slow, lying and restarting nodes: the audit finds nothing and the run ends."""
    rng = random.Random(seed)
    world = World(tmp_path, max_staleness=staleness, steps=4)
    workers = [letter * 64 for letter in "abcde"]
    for key in workers:
        world.enter(key)
    world.publish()
    held: list = []
    for _ in range(4000):
        if world.state.phase == "ended":
            break
        world.now += rng.random()
        key = rng.choice(workers)
        try:
            match rng.choice(["lease", "submit", "judge", "tick", "publish", "restart"]):
                case "lease":
                    held.append((key, world.lease(key)))
                case "submit" if held:
                    owner, lease = held.pop(rng.randrange(len(held)))
                    world.submit(owner, lease)
                case "judge" if world.state.pending:
                    outcome = rng.choice(["accept"] * 6 + ["soft", "hard"])
                    rewards = rng.choice([(0.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0)])
                    world.judge(rng.choice(world.state.pending), outcome, rewards)
                case "tick":
                    world.do(Tick(world.now))
                case "publish" if world.state.version in world.state.batches:
                    world.publish()
                case "restart" if rng.random() < 0.02:
                    world.book = Book(Store(sqlite_url(world.path)))
        except (Wait, Refused, StopIteration):
            continue
    assert world.state.phase == "ended"
    audit = world.audit()
    assert audit.findings == []
    assert state_hash(audit.state) == state_hash(world.state)
    for step, members in world.state.batches.items():
        assert all(0 <= step - version <= staleness for version, _ in members)

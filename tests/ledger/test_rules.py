"""The rules of a run, in a small honest world."""

import pytest

from shoal.errors import StateError
from shoal.ledger.batch_selection import groups_wanted
from shoal.ledger.batches import groups_beyond_share
from shoal.ledger.commands import Admin, AskLease, JoinRun, Publish, Reconfigure, SubmitVerdict, Tick
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.lease_granting import groups_a_worker
from shoal.ledger.state import state_hash
from shoal.ledger.versions import LinkRevealed
from shoal.protocol.encoding import digest
from shoal.protocol.messages import AdminRequest, GroupVerdict, Join, Receipt, Verdict
from tests.ledger.ledger_fixture import TRAINER, VALIDATOR, World, rules, started


@pytest.fixture
def world(tmp_path):
    return started(tmp_path, "a" * 64)


def test_a_group_without_signal_is_paid_but_does_not_fill_a_batch(world):
    world.serve("a" * 64, rewards=(1.0, 1.0, 1.0, 1.0))
    world.serve("a" * 64)
    assert world.state.main.batches == {}
    assert world.state.members["a" * 64].credits == 40


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
    world.tick(11)
    again = world.lease("b" * 64)
    assert again.blocks == lost.blocks and again.version == lost.version
    with pytest.raises(Refused, match="leased again"):
        world.submit("a" * 64, lost)


def test_an_honest_slow_worker_is_paid_if_nobody_took_its_block(world):
    lease = world.lease("a" * 64)
    world.tick(11)
    assert world.state.members["a" * 64].lapsed == 1
    world.judge(world.submit("a" * 64, lease))
    assert world.state.members["a" * 64].credits == 20
    assert world.state.main.free == []


def test_a_submission_for_a_version_that_is_too_old_is_superseded(world):
    slow = world.lease("a" * 64)
    world.enter("b" * 64)
    for _ in range(2):
        while len(world.state.main.batches) <= world.state.main.version:
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
    node = world.state.members["a" * 64]
    assert (node.credits, node.standing, node.refused, node.reasons) == (0, "quarantined", 2, {"sampling": 2})
    assert world.state.main.free == [(0, lease.blocks[0])]
    with pytest.raises(Wait, match="quarantined"):
        world.lease("a" * 64)
    world.tick(31)
    assert world.lease("a" * 64).blocks == lease.blocks


def serve_a_quarantine(world):
    """Fail once and wait until the worker may work again; returns how long that took."""
    world.serve("a" * 64, outcome="hard")
    wait = world.state.members["a" * 64].until - world.now
    world.tick(wait + 1)
    return wait


def test_quarantine_grows_with_each_failure(world):
    assert [serve_a_quarantine(world) for _ in range(3)] == [30.0, 60.0, 120.0]


def test_a_resumed_run_has_the_quarantine_of_its_changed_run_file(world):
    assert serve_a_quarantine(world) == 30.0
    world.do(Reconfigure({"note": 1}, 5, 10.0, world.now, quarantine_s=0.0))
    assert serve_a_quarantine(world) == 0.0
    assert world.audit().findings == []


def test_one_soft_refusal_costs_only_the_pay(world):
    world.serve("a" * 64, outcome="soft")
    assert world.state.members["a" * 64].standing == "new"
    assert world.state.members["a" * 64].credits == 0


def test_a_third_soft_refusal_quarantines_and_a_second_does_not(world):
    standings = []
    for _ in range(3):
        world.serve("a" * 64, outcome="soft")
        standings.append(world.state.members["a" * 64].standing)
    assert standings == ["new", "new", "quarantined"]


def test_a_kicked_node_cannot_join_again(world):
    world.do(Admin("kick", AdminRequest("a" * 64), world.now))
    with pytest.raises(Refused, match="the host removed"):
        world.enter("a" * 64)


def test_a_worker_of_another_dtype_than_the_runs_is_refused_when_it_joins(world):
    with pytest.raises(Refused, match="samples in float32, the worker offers bfloat16"):
        world.do(JoinRun("b" * 64, Join("worker", "b", 0.0, "test", "bfloat16", "cpu"), world.now))


def test_only_admitted_validators_judge(world):
    world.enter("a" * 64)
    with pytest.raises(Refused, match="not admitted"):
        world.enter("e" * 64, "validator")
    with pytest.raises(Refused, match="not a public key"):
        world.do(Admin("admit", AdminRequest("3f2a"), world.now))
    world.do(Admin("admit", AdminRequest("e" * 64), world.now))
    world.enter("e" * 64, "validator")


def test_a_verdict_must_audit_what_was_drawn(world):
    lease = world.lease("a" * 64)
    name = world.submit("a" * 64, lease)
    lazy = tuple(GroupVerdict(s, False, "accept", rewards=(0.0, 1.0, 0.0, 1.0)) for s in world.state.slots_of(lease))
    with pytest.raises(Refused, match="drawn for audit"):
        world.do(SubmitVerdict(VALIDATOR, Verdict(name, lazy), world.now))


def test_a_version_is_published_once(world):
    before = world.state.seq
    world.publish(0)
    assert world.state.seq == before
    with pytest.raises(Refused, match="published once"):
        world.do(Publish(TRAINER, 0, digest(b"other"), "m", {}, world.now))
    with pytest.raises(Refused, match="needs batch 0"):
        world.publish(1)


def test_a_version_that_is_signed_again_keeps_its_work(world):
    name = world.submit("a" * 64, world.lease("a" * 64))
    world.do(Publish(TRAINER, 0, world.state.main.versions[0].root, "signed again", {}, world.now))
    assert world.state.main.versions[0].manifest == "signed again" and world.state.main.version == 0
    assert world.state.main.versions[0].blocks and name in world.state.pending
    assert world.audit().findings == []


def test_synchronous_batches_are_ordered_by_slot_whatever_the_order_of_submission(tmp_path):
    world = World(tmp_path, max_staleness=0, steps=2)
    for letter in "ab":
        world.enter(letter * 64)
    world.publish()
    first, second = world.lease("a" * 64), world.lease("b" * 64)
    world.judge(world.submit("b" * 64, second))
    assert world.state.main.batches == {}
    world.judge(world.submit("a" * 64, first), rewards=(1.0, 1.0, 1.0, 1.0))
    assert world.state.main.batches == {}, "two flat groups leave only two with signal"
    world.serve("a" * 64)
    assert world.state.main.batches[0] == ((0, 2), (0, 3), (0, 4), (0, 5))


def shared(tmp_path, workers, **changes):
    """A run of four-group batches in which a worker may fill half of one."""
    world = World(tmp_path, **({"worker_share": 0.5} | changes))
    for letter in workers:
        world.enter(letter * 64)
    world.publish()
    return world


def makers(world, step):
    return [world.state.maker_of(world.state.main, place)[0] for place in world.state.main.batches[step]]


def test_a_batch_takes_at_most_its_share_from_each_worker_in_the_order_of_acceptance(tmp_path):
    world = shared(tmp_path, "ab")
    world.serve("a" * 64)
    world.serve("a" * 64)
    assert world.state.main.batches == {} and len(world.state.main.pool) == 4
    assert groups_beyond_share(world.state, world.state.main) == 2
    world.serve("b" * 64)
    assert world.state.main.batches[0] == ((0, 0), (0, 1), (0, 4), (0, 5))
    assert world.state.main.pool == [(0, 2), (0, 3)], "the surplus waits for the next batch"
    assert world.state.members["a" * 64].credits == 40, "and is paid all the same"
    assert world.audit().findings == []


def test_a_worker_that_has_filled_its_share_of_the_coming_batches_waits_and_the_others_do_not(tmp_path):
    world = shared(tmp_path, "ab")
    for _ in range(2):
        world.serve("a" * 64)
    with pytest.raises(Wait, match="your share of the coming batches is full: 4 groups"):
        world.lease("a" * 64)
    assert groups_wanted(world.state, world.state.main) == 4
    world.serve("b" * 64)
    world.publish()
    world.lease("a" * 64)


def test_a_workers_surplus_never_keeps_others_from_work(tmp_path):
    """One group a worker, blocks of two: half of all work is surplus, and the run still ends."""
    world = shared(tmp_path, "abcd", worker_share=0.25)
    while world.state.phase != "ended":
        for letter in "abcd":
            try:
                world.serve(letter * 64)
            except Wait:
                continue
        assert world.state.main.version in world.state.main.batches, "a batch is always formed in the end"
        assert sorted(makers(world, world.state.main.version)) == list("abcd")
        world.publish()
    assert world.audit().findings == []


def test_an_honest_worker_alone_is_never_starved_at_the_default_share(tmp_path):
    world = shared(tmp_path, "a", worker_share=1.0)
    while world.state.phase != "ended":
        while len(world.state.main.batches) <= world.state.main.version:
            world.serve("a" * 64)
        world.publish()
    assert world.state.main.version == 5


@pytest.mark.parametrize(("share", "groups"), [(1.0, 100), (0.29, 29), (0.001, 1)])
def test_the_share_is_a_whole_number_of_groups_and_at_least_one(share, groups):
    assert groups_a_worker(rules(worker_share=share, batch_groups=100)) == groups


def test_tokens_beyond_the_paid_ones_earn_nothing_and_are_still_learned_from(tmp_path):
    world = started(tmp_path, "a" * 64, paid_tokens=3)
    world.serve("a" * 64, tokens=11)
    assert world.state.members["a" * 64].credits == 22, "two groups of four rollouts, below the cap of 12"
    world.serve("a" * 64, tokens=200)
    assert world.state.members["a" * 64].credits == 22 + 2 * 12
    assert world.state.main.versions[0].slots[2].tokens == 200, "the log keeps the length"
    assert world.audit().findings == []


def test_influence_counts_only_the_groups_that_batches_took(tmp_path):
    world = shared(tmp_path, "ab")
    world.serve("a" * 64, tokens=100)
    world.serve("a" * 64, tokens=100)
    assert world.state.members["a" * 64].influence == 0.0, "nothing is learned yet"
    world.serve("b" * 64)
    shares = [world.state.members[letter * 64].influence for letter in "ab"]
    assert shares == [2 * 0.5 * 100, 2 * 0.5 * 10], "mean |reward - group mean| is 0.5, times its policy tokens"


def test_a_paused_run_gives_no_leases_and_a_kicked_node_none_either(world):
    world.do(Admin("pause", AdminRequest(), world.now))
    with pytest.raises(Wait, match="paused"):
        world.lease("a" * 64)
    world.do(Admin("resume", AdminRequest(), world.now))
    world.do(Admin("kick", AdminRequest("a" * 6), world.now))
    with pytest.raises(Refused, match="removed"):
        world.lease("a" * 64)


@pytest.mark.parametrize("action", ["drain", "pause"])
def test_a_run_that_leases_nothing_new_returns_its_open_lease_to_a_worker_that_comes_back(world, action):
    """Otherwise the lease stays open, and a draining run ends only at its deadline."""
    lease = world.lease("a" * 64)
    world.enter("b" * 64)
    world.do(Admin(action, AdminRequest(), world.now))
    assert world.lease("a" * 64) is lease
    with pytest.raises(Wait, match={"drain": "draining", "pause": "paused"}[action]):
        world.lease("b" * 64)
    world.judge(world.submit("a" * 64, lease))
    assert world.state.phase == {"drain": "ended", "pause": "paused"}[action]
    with pytest.raises(Wait, match={"drain": "ended", "pause": "paused"}[action]):
        world.lease("a" * 64)
    assert world.audit().findings == []


def test_a_drained_run_reveals_the_secrets_of_its_last_versions_and_a_running_one_does_not(world):
    links = {0: ("aa" * 32, "bb" * 32)}
    assert world.do(Tick(world.now, links)) == []
    world.do(Admin("drain", AdminRequest(), world.now))
    assert [entry.body for entry in world.do(Tick(world.now, links))] == [LinkRevealed(0, *links[0])]
    assert world.do(Tick(world.now, links)) == []


def test_nothing_is_taken_after_the_end(world):
    lease = world.lease("a" * 64)
    world.tick(11)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert world.state.phase == "ended"
    with pytest.raises(Refused, match="the run has ended"):
        world.submit("a" * 64, lease)


def test_a_versions_links_are_published_only_when_nothing_can_be_sent_for_it(world):
    """At max_staleness 1, work for version 0 is taken until version 2 is there."""
    revealed = []
    for version in (1, 2):
        while len(world.state.main.batches) <= world.state.main.version:
            world.serve("a" * 64)
        links = dict.fromkeys(range(version + 1), ("aa" * 32, "bb" * 32))
        entries = world.do(Publish(TRAINER, version, digest(b"root%d" % version), "m", links, world.now))
        revealed.append([entry.body.version for entry in entries if isinstance(entry.body, LinkRevealed)])
    assert revealed == [[], [0]]


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

    monkeypatch.setattr(world.log_writer.store, "append", full_disk)
    with pytest.raises(StateError):
        world.submit("a" * 64, lease)
    assert state_hash(world.state) == before
    monkeypatch.undo()
    world.submit("a" * 64, lease)

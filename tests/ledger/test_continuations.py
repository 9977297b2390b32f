"""Continuations: when they are leased, what waits for them, and what happens to those that nobody makes."""

import pytest

from shoal.ledger import lease_granting as leases_rules
from shoal.ledger.batch_selection import blocks_in_the_way, blocks_to_continue, groups_wanted, next_members, supply
from shoal.ledger.batches import SlotVoid
from shoal.ledger.commands import Admin, AskLease, ReturnLeases, SubmitVerdict
from shoal.ledger.errors import Refused, Wait
from shoal.ledger.slot_draws import lease_of, solved_groups
from shoal.protocol.algorithm_config import Composition, Vine
from shoal.protocol.constants import CONTINUATIONS, EPISODES
from shoal.protocol.continuations import FIRST_BLOCK, continued_slot, is_continued
from shoal.protocol.messages import AdminRequest, EnvSpec, GroupVerdict, Verdict
from tests.ledger.ledger_fixture import VALIDATOR, started

ALICE, BOB, CAROL = "a" * 64, "b" * 64, "c" * 64
VINE = Composition(credit=Vine(continuations=2, every=2, most=2))
FLAT = (1.0,) * 4
ENV = EnvSpec("arithmetic", "0" * 64, 10, 1.0, {})


def vine_world(tmp_path, workers=(ALICE, BOB), **changes):
    return started(tmp_path, workers, **{"algorithm": VINE, "max_staleness": 0, **changes})


def voids(world):
    return [entry.body for entry in world.audit().entries if isinstance(entry.body, SlotVoid)]


def serve_all(world, key=ALICE, **how):
    """Fill leases of one worker until no more is given."""
    while True:
        try:
            world.serve(key, **how)
        except Wait:
            return


def test_groups_of_the_next_batch_are_continued_before_new_blocks_are_leased(tmp_path):
    world = vine_world(tmp_path)
    first = world.serve(ALICE)
    assert first.blocks == (0,)
    again = world.lease(BOB)
    assert again.blocks == (FIRST_BLOCK,), "block 0 is accepted, so what comes next continues it"
    assert world.state.slots_of(again) == [continued_slot(0, 2), continued_slot(1, 2)]
    assert world.lease(ALICE).blocks == (1,), "and nobody else is given the same"


def test_a_synchronous_batch_waits_for_continuations_and_holds_none(tmp_path):
    world = vine_world(tmp_path)
    world.serve(ALICE)
    held = world.lease(BOB)
    world.serve(ALICE)
    world.serve(ALICE)  # the continuations of block 1
    assert len(world.state.main.pool) == 4 and 0 not in world.state.main.batches
    with pytest.raises(Wait):
        world.lease(ALICE)
    world.judge(world.submit(BOB, held), rewards=(0.0, 1.0) * 8)
    assert world.state.main.batches[0] == ((0, 0), (0, 1), (0, 2), (0, 3))
    slot = world.state.main.versions[0].slots[continued_slot(0, 2)]
    assert (slot.status, slot.rewards) == ("continued", (0.0, 1.0) * 8)
    assert world.state.members[BOB].credits > 0 and world.audit().findings == []


def test_in_a_synchronous_run_only_groups_that_the_batch_takes_are_continued(tmp_path):
    world = vine_world(tmp_path)
    slow = world.lease(ALICE)
    world.enter(CAROL)
    later = world.lease(BOB)
    world.judge(world.submit(BOB, later))
    assert blocks_to_continue(world.state, world.state.main) == [], "block 0 may still bring groups of lower slots"
    world.judge(world.submit(ALICE, slow), rewards=FLAT)
    assert blocks_to_continue(world.state, world.state.main) == [(0, FIRST_BLOCK + 1)], (
        "and a flat block is not continued"
    )


def test_a_lease_of_continuations_names_the_parents_that_teach_something(tmp_path):
    world = vine_world(tmp_path, secret=b"s" * 32, envs=(ENV,))
    lease, link = world.lease(ALICE), world.links[0][1]
    name = world.submit(ALICE, lease)
    slots = world.state.slots_of(lease)
    verdicts = tuple(
        GroupVerdict(slot, audited=True, outcome="accept", rewards=rewards, tokens=10)
        for slot, rewards in zip(slots, (FLAT, (0.0, 1.0, 0.0, 1.0)), strict=True)
    )
    world.do(SubmitVerdict(VALIDATOR, Verdict(name, verdicts), world.now, "p" * 64, 1.0, ()))
    asked = lease_of(world.state, world.lease(BOB), link)
    plain = lease_of(world.state, lease, link)
    assert [block.kind for block in (*plain.blocks, *asked.blocks)] == [EPISODES, CONTINUATIONS]
    flat, taught = asked.blocks[0].slots
    assert flat.parent is None and taught.parent is not None
    assert (taught.parent.submission, taught.parent.index) == (name, 1)
    assert taught.parent.digest == world.state.submissions[name].groups[1]
    before = plain.blocks[0].slots[1]
    assert (taught.seed, taught.env, taught.task) == (before.seed, before.env, before.task)


def test_continuations_change_neither_the_supply_nor_what_is_usual_for_groups(tmp_path):
    world = vine_world(tmp_path, max_staleness=1)
    world.serve(ALICE)
    usual = world.state.accepted_groups, world.state.influence, world.state.block_tokens, world.state.main.flat
    had = supply(world.state, world.state.main), groups_wanted(world.state, world.state.main)
    lease, pace = world.lease(BOB), world.state.members[BOB].pace_s
    assert is_continued(lease.blocks[0])
    assert (supply(world.state, world.state.main), groups_wanted(world.state, world.state.main)) == had
    world.now += 3.0
    world.judge(world.submit(BOB, lease), rewards=FLAT)
    assert (
        world.state.accepted_groups,
        world.state.influence,
        world.state.block_tokens,
        world.state.main.flat,
    ) == usual
    assert world.state.members[BOB].pace_s == pace and len(world.state.main.pool) == 2


def test_continuations_of_which_none_was_due_bring_neither_trust_nor_stake(tmp_path):
    """Where rollouts are short, whole blocks are empty. Whoever fills them has shown nothing, and a refusal or a lapse
    takes the pay of real work all the same."""
    world = vine_world(tmp_path, max_staleness=1)
    world.serve(ALICE)
    assert is_continued(world.serve(BOB, rewards=(), tokens=0).blocks[0])
    bob = world.state.members[BOB]
    assert (bob.standing, bob.accepted, bob.valid_blocks, bob.stake, bob.credits) == ("new", 0, 0, [], 0)
    assert world.serve(BOB).blocks == (1,)
    stake = list(bob.stake)
    assert is_continued(world.serve(BOB, rewards=(), tokens=0).blocks[0])
    assert (bob.standing, bob.accepted, bob.valid_blocks, bob.stake) == ("good", 2, 1, stake)
    assert stake == [10, 10] and world.audit().findings == []


def test_a_recheck_of_continuations_of_which_none_was_due_confirms_no_validator(tmp_path):
    judges = tuple(letter * 64 for letter in "def")
    world = vine_world(tmp_path, validators=judges, max_staleness=1)
    for rewards, tokens in (((0.0, 1.0, 0.0, 1.0), 10), ((), 0)):
        name = world.submit(ALICE, world.lease(ALICE), recheck=0.0)
        before = [world.state.members[key].turns.confirmed for key in judges]
        for judge in judges[:2]:
            world.judge(name, by=judge, rewards=rewards, tokens=tokens)
        assert name not in world.state.rechecks
        gained = sum(world.state.members[key].turns.confirmed for key in judges) - sum(before)
        assert gained == (tokens > 0)
    assert world.audit().findings == []


def test_continuations_are_audited_at_least_as_often_as_their_parents_would_be(tmp_path):
    """Whoever picks seeds so that all continuations of a lost game win turns the game's credit round, and equal rewards
    have no influence of their own."""
    world = vine_world(tmp_path, max_staleness=1, audit_rate=0.05)
    world.serve(ALICE, tokens=2)
    world.serve(ALICE)
    world.serve(ALICE, tokens=6)
    bob = world.state.members[BOB]
    bob.valid_blocks, bob.stake = 600, [10] * 80
    name = world.submit(BOB, world.lease(BOB), draw=0.05 * 1.4)
    submission, mean = world.state.submissions[name], (2 * 1.0 + 2 * 3.0) / 4
    assert submission.rate == pytest.approx(0.05 * 3.0 / mean) and len(submission.audited) == 2


def test_groups_of_continuations_count_for_no_draws(tmp_path):
    world = vine_world(tmp_path, secret=b"s" * 32, envs=(ENV,), max_staleness=1, batch_groups=2)
    world.serve(ALICE)
    world.serve(BOB)
    assert continued_slot(0, 2) in world.state.main.versions[0].slots and 0 in world.state.main.batches
    assert len(solved_groups(world.state, world.state.main, 0, world.links[0][1])) == 2


def test_an_asynchronous_batch_takes_only_groups_whose_continuations_are_final(tmp_path):
    world = vine_world(tmp_path, max_staleness=1)
    world.serve(ALICE)
    world.lease(BOB)
    world.serve(ALICE)
    assert len(world.state.main.pool) == 4 and next_members(world.state, world.state.main) == []
    world.serve(ALICE)
    assert next_members(world.state, world.state.main) == [(0, 2), (0, 3)]


def test_the_last_batch_of_a_version_waits_for_continuations_that_nobody_has_begun(tmp_path):
    world = vine_world(tmp_path, max_staleness=1, batch_groups=2)
    world.serve(ALICE)
    world.serve(ALICE)
    late = world.lease(BOB)
    world.publish()
    while next_members(world.state, world.state.main) == []:
        held = [lease.id for lease in world.state.open_leases_of(ALICE)]
        world.judge(world.submit(ALICE, world.lease(ALICE, held)))
    assert 1 not in world.state.main.batches, "block 1 of version 0 may still come"
    world.judge(world.submit(BOB, late))
    assert blocks_in_the_way(world.state, world.state.main) == [(0, FIRST_BLOCK + 1)]
    assert 1 not in world.state.main.batches
    while 1 not in world.state.main.batches:
        world.serve(ALICE)
    assert world.state.main.batches[1] == ((0, 2), (0, 3)) and world.audit().findings == []


def test_continuations_that_many_workers_gave_back_are_void_and_their_parents_used(tmp_path):
    droppers = [letter * 64 for letter in "bcde"]
    world = vine_world(tmp_path, workers=(ALICE, *droppers), max_staleness=1, batch_groups=2)
    world.serve(ALICE)
    for key in droppers:
        lease = world.lease(key)
        assert lease.blocks == (FIRST_BLOCK,)
        world.do(ReturnLeases(key, (lease.id,), world.now))
        world.now += 20.0
    assert [(void.slots, void.cause) for void in voids(world)] == [
        ((continued_slot(0, 2), continued_slot(1, 2)), "dropped")
    ]
    assert world.state.main.batches[0] == ((0, 0), (0, 1)) and world.audit().findings == []


def test_a_drain_leaves_out_continuations_that_nobody_makes(tmp_path):
    world = vine_world(tmp_path, batch_groups=2, max_staleness=1)
    lease = world.lease(ALICE)
    world.do(Admin("drain", AdminRequest(), world.now))
    world.judge(world.submit(ALICE, lease))
    assert [void.cause for void in voids(world)] == ["drained"]
    assert world.state.main.batches[0] == ((0, 0), (0, 1)) and world.state.phase == "draining"
    world.publish()
    assert world.state.phase == "ended" and world.audit().findings == []


def test_a_drain_after_the_parents_leaves_them_out_too_and_waits_for_those_at_work(tmp_path):
    world = vine_world(tmp_path, max_staleness=1)
    world.serve(ALICE)
    lease = world.lease(BOB)
    world.serve(ALICE)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert [void.slots[0] for void in voids(world)] == [continued_slot(2, 2)]
    assert 0 not in world.state.main.batches
    world.judge(world.submit(BOB, lease))
    assert 0 in world.state.main.batches and world.audit().findings == []


def test_a_synchronous_run_that_is_drained_and_resumed_learns_the_same(tmp_path):
    """Its parents keep the credit of their continuations, which somebody makes after the resumption."""
    world = vine_world(tmp_path)
    world.serve(ALICE)
    lease = world.lease(BOB)
    world.serve(ALICE)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert voids(world) == [] and world.state.phase == "draining"
    world.do(Admin("resume", AdminRequest(), world.now))
    world.judge(world.submit(BOB, lease))
    assert world.serve(ALICE).blocks == (FIRST_BLOCK + 1,)
    slots = world.state.main.versions[0].slots
    assert world.state.main.batches[0] == ((0, 0), (0, 1), (0, 2), (0, 3))
    assert {slots[continued_slot(slot, 2)].status for slot in range(4)} == {"continued"}
    assert voids(world) == [] and world.audit().findings == []


def test_a_drain_of_a_synchronous_run_ends_without_a_batch_that_lacks_continuations(tmp_path):
    """It waits for what is at work. What nobody begins is not left out of a batch: there is none."""
    world = vine_world(tmp_path, batch_groups=2)
    world.serve(ALICE)
    lease = world.lease(BOB)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert world.state.phase == "draining"
    world.judge(world.submit(BOB, lease))
    assert 0 in world.state.main.batches
    world.publish()
    assert world.state.phase == "ended" and world.audit().findings == []
    (tmp_path / "unbegun").mkdir()
    world = vine_world(tmp_path / "unbegun", batch_groups=2)
    world.serve(ALICE)
    world.do(Admin("drain", AdminRequest(), world.now))
    assert world.state.phase == "ended" and not world.state.main.batches
    assert voids(world) == [] and world.audit().findings == []


def test_one_lease_holds_one_kind_of_blocks(tmp_path, monkeypatch):
    world = vine_world(tmp_path)
    monkeypatch.setattr(leases_rules, "_most_blocks", lambda *asked: 64)

    def shared(*places):
        asked = AskLease(ALICE, (), 0.0, world.now)
        return leases_rules._shared(world.state, world.state.members[ALICE], asked, list(places))

    assert shared((0, 1), (0, 2), (0, FIRST_BLOCK)) == [1, 2]
    assert shared((0, FIRST_BLOCK), (0, FIRST_BLOCK + 1), (1, FIRST_BLOCK)) == [FIRST_BLOCK, FIRST_BLOCK + 1]


@pytest.mark.parametrize("rewards", [(0.0,) * 17, (0.0, 1e9)])
def test_a_verdict_with_more_continuations_than_there_can_be_is_refused(tmp_path, rewards):
    world = vine_world(tmp_path)
    world.serve(ALICE)
    name = world.submit(BOB, world.lease(BOB))
    with pytest.raises(Refused, match="16 rewards"):
        world.judge(name, rewards=rewards)


def test_ordinary_blocks_never_get_the_numbers_of_continuations(tmp_path, monkeypatch):
    world = vine_world(tmp_path)
    monkeypatch.setattr(leases_rules, "is_continued", lambda block: block >= 1)
    world.lease(ALICE)
    with pytest.raises(Wait, match="no more are numbered"):
        world.lease(BOB)

"""Groups that more than one batch takes: which, how often, in what order, and what a lying host cannot do with them."""

from collections import Counter

import msgspec
import pytest
from msgspec import UNSET

from shoal.ledger.answers import Refused, Wait
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.facts.pay import Credit
from shoal.ledger.facts.run import Admin, Tick
from shoal.ledger.law import LAW
from shoal.ledger.log.book import Book
from shoal.ledger.log.credits import explain
from shoal.ledger.log.store import Store, sqlite_url
from shoal.ledger.log.verify import report, verify
from shoal.ledger.rules.leases import groups_wanted
from shoal.ledger.state import state_hash
from shoal.ledger.table import read_entry
from shoal.protocol.audits import influence
from shoal.protocol.compositions import Grpo
from shoal.protocol.types import Rules, Uses
from shoal.protocol.wire import WireError, from_json, to_json
from tests.ledger.test_verify import rows_of
from tests.ledger.world import VALIDATOR, World, rules

WORKER, OTHER = "a" * 64, "b" * 64
JUDGES = ("d" * 64, "e" * 64, "f" * 64)
TRUSTING = msgspec.structs.replace(LAW, probation_blocks=1, trust=1e-9, refused_blocks=1)
"""A law under which a worker is audited at the run's own rate from its second block on."""


def begun(tmp_path, most=3, repeated=2, **how):
    """A run that may use groups again, with its first version and one worker."""
    world = World(tmp_path, uses=Uses(most, repeated), **({"max_staleness": 2, "steps": 9} | how))
    world.enter(WORKER)
    world.publish()
    return world


def learn(world, steps=1, key=WORKER, **how):
    """Serve until the next batches are formed, each followed by its version."""
    for _ in range(steps):
        while world.state.main.version not in world.state.main.batches:
            world.serve(key, **how)
        world.publish()


def batches(world):
    return [list(groups) for _, groups in sorted(world.state.main.batches.items())]


def formed(world):
    entries = [read_entry(data)[0] for data, _ in world.book.store.read()]
    return [entry.body for entry in entries if isinstance(entry.body, BatchFormed)]


def uses(world):
    return Counter(place for groups in batches(world) for place in groups)


# --- which groups, in what order ---


def test_a_batch_takes_new_groups_and_then_repeats_those_with_the_fewest_uses_of_the_newest_version_by_slot(tmp_path):
    world = begun(tmp_path)
    learn(world, 4)
    assert batches(world) == [
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [(1, 0), (1, 1), (2, 0), (2, 1)],
        [(2, 0), (2, 1), (3, 0), (3, 1)],
    ]  # fmt: skip
    assert [batch.repeated for batch in formed(world)] == [
        UNSET, ((0, 0), (0, 1)), ((1, 0), (1, 1)), ((2, 0), (2, 1)),
    ]  # fmt: skip
    assert world.audit().findings == []


def test_a_group_is_in_at_most_so_many_batches_and_new_ones_fill_what_too_few_can_be_repeated(tmp_path):
    """Three of four places are for repeated groups, but three uses of one new group do not fill them for long."""
    world = begun(tmp_path, repeated=3, max_staleness=8)
    learn(world, 8)
    assert uses(world).most_common(1)[0][1] == 3
    new = [len(batch.groups) - len(batch.repeated or ()) for batch in formed(world)]
    assert min(new) >= 1 and sum(new) * 3 >= 4 * len(new)
    assert world.audit().findings == []


def test_no_group_is_used_when_it_is_older_than_max_staleness(tmp_path):
    world = begun(tmp_path, most=9, repeated=3, max_staleness=1)
    learn(world, 6)
    ages = {step - version for step, groups in world.state.main.batches.items() for version, _ in groups}
    assert ages == {0, 1} and world.audit().findings == []


def test_a_group_that_was_not_audited_is_used_once(tmp_path):
    world = begun(tmp_path, law=TRUSTING, audit_rate=0.05)
    learn(world)
    first = world.state.main.batches[0]
    assert all(world.state.main.uses.groups[version][slot].uses == 1 for version, slot in first)
    for _ in range(2):
        while world.state.main.version not in world.state.main.batches:
            world.judge(world.submit(WORKER, world.lease(WORKER), draw=0.999))
        world.publish()
    audited = {body.slot for body in accepted(world) if body.auditor}
    assert audited == {slot for _, slot in first}
    assert {place for place, count in uses(world).items() if count > 1} <= {*first}


def accepted(world):
    entries = (read_entry(data)[0] for data, _ in world.book.store.read())
    return [entry.body for entry in entries if isinstance(entry.body, GroupAccepted)]


def test_repeated_groups_count_towards_their_workers_share(tmp_path):
    """Half of a batch is one worker's at most, new and repeated groups together."""
    world = begun(tmp_path, worker_share=0.5, max_staleness=4)
    world.enter(OTHER)
    for _ in range(5):
        while world.state.main.version not in world.state.main.batches:
            for key in (WORKER, OTHER):
                try:
                    world.serve(key)
                except Wait:
                    pass
        world.publish()
    for groups in world.state.main.batches.values():
        assert Counter(world.state.maker_of(world.state.main, place) for place in groups) == {WORKER: 2, OTHER: 2}
    assert sum(len(batch.repeated or ()) for batch in formed(world)) > 0


def test_a_run_with_repeated_groups_asks_for_fewer_new_ones(tmp_path):
    (tmp_path / "once").mkdir()
    once = World(tmp_path / "once", max_staleness=2, steps=9)
    once.enter(WORKER)
    once.publish()
    again = begun(tmp_path)
    for world in (once, again):
        learn(world, 6)
    assert (once.state.accepted_groups, again.state.accepted_groups) == (24, 4 + 5 * 2)


def test_the_next_batch_is_never_starved_for_the_sake_of_later_ones(tmp_path):
    """Nothing can be repeated, so the next batch needs as many new groups as one without repeated groups, and shares bound
    what each worker adds to it."""
    world = begun(tmp_path, repeated=4, batch_groups=8, max_staleness=1, worker_share=0.25)
    keys = [letter * 64 for letter in "abcd"]
    for key in keys[1:]:
        world.enter(key)
    for key in keys[:3] * 2:
        world.serve(key)
    assert len(world.state.main.pool) == 12 and not world.state.main.batches
    assert groups_wanted(world.state, world.state.main) > 0
    world.serve(keys[3])
    assert len(world.state.main.batches[0]) == 8


# --- whom nobody trusts any more ---


def repeats(world):
    """What the next batch would repeat, after one more batch of new groups."""
    return formed(world)[-1].repeated


def test_groups_of_a_kicked_worker_are_not_used_again(tmp_path):
    world = begun(tmp_path)
    world.enter(OTHER)
    learn(world)
    world.do(Admin("kick", WORKER, world.now))
    learn(world, key=OTHER)
    assert repeats(world) is UNSET


def test_groups_of_a_quarantined_worker_are_not_used_again_until_it_is_restored(tmp_path):
    world = begun(tmp_path, max_staleness=4)
    world.enter(OTHER)
    learn(world)
    world.judge(world.submit(WORKER, world.lease(WORKER)), "hard")
    learn(world, key=OTHER)
    assert repeats(world) is UNSET
    world.now += 40.0
    world.do(Tick(world.now))
    world.do(Admin("kick", OTHER, world.now))
    learn(world)
    assert repeats(world) == ((0, 0), (0, 1))


def test_groups_that_only_a_removed_validator_audited_are_not_used_again(tmp_path):
    world = World(tmp_path, JUDGES, uses=Uses(3, 2), max_staleness=2, steps=9)
    world.enter(WORKER)
    world.publish()
    learn(world, by=JUDGES[0])
    world.do(Admin("kick", JUDGES[0], world.now))
    learn(world, by=JUDGES[1])
    assert repeats(world) is UNSET
    learn(world, by=JUDGES[1])
    assert len(repeats(world)) == 2, "what another audited meanwhile is used again"


def court(tmp_path):
    world = World(tmp_path, JUDGES, uses=Uses(3, 2), max_staleness=4, steps=9)
    for key in (WORKER, OTHER):
        world.enter(key)
    world.publish()
    return world


def test_a_slash_ends_the_use_of_all_groups_that_its_worker_made_before(tmp_path):
    world = court(tmp_path)
    learn(world, by=JUDGES[0])
    forged = world.submit(WORKER, world.lease(WORKER))
    for judge in JUDGES[:2]:
        world.judge(forged, "hard", by=judge)
    world.now += 4000.0
    world.do(Tick(world.now))
    assert world.state.members[WORKER].standing != "quarantined"
    learn(world, key=OTHER, by=JUDGES[0])
    assert repeats(world) is UNSET and world.audit().findings == []


def test_a_group_waits_for_its_recheck_before_it_is_used_again_and_is_then_used(tmp_path):
    world = court(tmp_path)
    checked = [world.submit(WORKER, world.lease(WORKER), recheck=0.0) for _ in range(2)]
    for name in checked:
        world.judge(name, by=JUDGES[0])
    world.publish()
    assert world.state.rechecks == checked
    learn(world, key=OTHER, by=JUDGES[0])
    assert repeats(world) is UNSET
    for name in checked:
        world.judge(name, by=JUDGES[1])
    learn(world, key=OTHER, by=JUDGES[0])
    assert repeats(world) is not UNSET and world.audit().findings == []


def test_a_recheck_that_does_not_confirm_ends_the_use_of_its_groups(tmp_path):
    """The second validator refuses, the third accepts: nobody is punished, and the groups are used no more."""
    world = court(tmp_path)
    checked = [world.submit(WORKER, world.lease(WORKER), recheck=0.0) for _ in range(2)]
    for name in checked:
        world.judge(name, by=JUDGES[0])
    world.publish()
    for name in checked:
        world.judge(name, "soft", by=JUDGES[1])
        world.now += 700.0
        world.do(Tick(world.now))
    assert not world.state.rechecks
    learn(world, key=OTHER, by=JUDGES[0])
    assert repeats(world) is UNSET and world.audit().findings == []


# --- pay, influence, audits ---


def test_a_group_is_paid_once_and_its_influence_counts_each_use(tmp_path):
    world = begun(tmp_path)
    learn(world, 4)
    member, taken = world.state.members[WORKER], uses(world)
    assert sum(taken.values()) == 16 and max(taken.values()) == 2
    assert member.credits == 10 * world.state.accepted_groups == 100
    assert member.influence == pytest.approx(16 * influence((0.0, 1.0, 0.0, 1.0), 10, Grpo()))
    lines = [
        line for line in explain(world.audit().entries, world.state, WORKER) if "learned from again" in line.detail
    ]
    assert [(line.version, line.slot, line.credits) for line in lines[:2]] == [(0, 0, 0), (0, 1, 0)]
    assert "by step 1, use 2 of at most 3: paid once" in lines[0].detail


def test_a_group_that_may_be_used_three_times_is_audited_three_times_as_often(tmp_path):
    usual = influence((0.0, 1.0), 100, Grpo())
    assert influence((0.0, 1.0), 100, Grpo(), uses=3) == 3 * usual
    world = begun(tmp_path, law=TRUSTING, audit_rate=0.05)
    world.serve(WORKER)
    name = world.submit(WORKER, world.lease(WORKER), draw=0.14)
    assert world.state.submissions[name].audited == ()
    with pytest.raises(Refused, match="was drawn for audit but not audited"):
        world.judge(name, audited=False)
    world.judge(name, audited=True)
    name = world.submit(WORKER, world.lease(WORKER), draw=0.16)
    world.judge(name, audited=False)


def test_what_a_validator_accepts_for_three_uses_is_rechecked_three_times_as_often(tmp_path):
    """A friend among the validators calls a forgery audited, and it is learned from three times."""
    world = court(tmp_path)
    (tmp_path / "once").mkdir()
    once = World(tmp_path / "once", JUDGES, max_staleness=4)
    once.enter(WORKER)
    once.publish()
    for each, drawn in ((world, (True, True, False)), (once, (True, False, False))):
        for judge in JUDGES:
            each.state.members[judge].turns.confirmed = 1000
        for draw, expected in zip((0.04, 0.14, 0.16), drawn, strict=True):
            each.state.members[WORKER].stake = [10_000]  # so much that the pay of a submission raises no rate
            name = each.submit(WORKER, each.lease(WORKER), recheck=draw)
            each.judge(name, by=JUDGES[0])
            assert (name in each.state.rechecks) == expected, draw


# --- runs that use each group once ---


def test_rules_and_events_of_a_run_that_uses_each_group_once_name_no_uses(tmp_path):
    assert b"uses" not in to_json(rules()) and rules().group_uses == 1 and rules().repeated_groups == 0
    world = World(tmp_path)
    world.enter(WORKER)
    world.publish()
    learn(world, 2)
    log = b"".join(data for data, _ in world.book.store.read())
    assert b"repeated" not in log and b"auditor" not in log
    assert not world.state.main.uses
    assert from_json(to_json(rules(uses=Uses(3, 2))), Rules).group_uses == 3
    with pytest.raises(WireError):
        from_json(to_json(rules(uses=Uses(1, 2))), Rules)


def test_a_synchronous_run_uses_each_group_once(tmp_path):
    world = begun(tmp_path, max_staleness=0)
    learn(world, 3)
    assert max(uses(world).values()) == 1 and world.audit().findings == []


def test_a_restart_in_the_middle_forms_the_same_batches(tmp_path):
    world = begun(tmp_path)
    learn(world, 2)
    before = state_hash(world.state)
    world.book = Book(Store(sqlite_url(world.path)))
    assert state_hash(world.state) == before
    learn(world, 2)
    assert batches(world)[3] == [(2, 0), (2, 1), (3, 0), (3, 1)]


# --- a host that forms other batches ---


@pytest.fixture
def lines(tmp_path):
    """(time, body) of each event of an honest run of four batches, the last of which is its last event."""
    world = begun(tmp_path)
    learn(world, 3)
    while 3 not in world.state.main.batches:
        world.serve(WORKER)
    entries = [read_entry(data)[0] for data, _ in world.book.store.read()]
    last = max(place for place, entry in enumerate(entries) if isinstance(entry.body, BatchFormed))
    assert report(world.audit()).endswith("nothing paid twice or used more than 3 times")
    return [(entry.time, entry.body) for entry in entries[: last + 1]]


def with_last_batch(lines, groups, repeated):
    time, last = lines[-1]
    return [*lines[:-1], (time, msgspec.structs.replace(last, groups=groups, repeated=repeated))]


def found_in(lines):
    """Findings, other than those that an altered log has in any case."""
    return verify(rows_of(lines)).findings


TOO_LATE = ((0, 0), (0, 1), (3, 0), (3, 1)), ((0, 0), (0, 1))
OTHER_ORDER = ((1, 0), (1, 1), (3, 0), (3, 1)), ((1, 0), (1, 1))
TOO_MANY = ((2, 0), (2, 1), (1, 0), (3, 0)), ((1, 0), (2, 0), (2, 1))

FORGED = {
    "too late": (TOO_LATE, "the batch of step 3 used version 0 slot 0, which is 3 versions old, limit 2"),
    "not by the order": (OTHER_ORDER, "(batch_formed) is not what the rules give here: groups is ((1, 0), (1, 1)"),
    "too many at once": (TOO_MANY, "the batch of step 3 used 3 groups again, limit 2"),
    "repeats that it does not name": (
        (((2, 0), (2, 1), (3, 0), (3, 1)), UNSET),
        "the batch of step 3 says that it repeats 0 groups, and it repeats 2",
    ),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_batch_that_the_rules_do_not_allow_is_named_with_the_clause_that_it_breaks(lines, forgery):
    batch, named = FORGED[forgery]
    found = found_in(with_last_batch(lines, *batch))
    assert any(named in finding for finding in found)
    assert any("(batch_formed) is not what the rules give here" in finding for finding in found)


def test_a_group_used_too_often_is_named(lines):
    """A host that goes on for ever with one group, which it likes."""
    at = [place for place, (_, body) in enumerate(lines) if isinstance(body, BatchFormed)]
    for step, place in enumerate(at[1:], 1):
        time, body = lines[place]
        mine = tuple(sorted({(0, 0), *body.groups[1:]}))
        repeated = tuple(sorted({(0, 0), *(body.repeated or ())} & {*mine}))
        lines[place] = time, msgspec.structs.replace(body, step=step, groups=mine, repeated=repeated)
    assert any("version 0 slot 0: used 4 times, accepted 1, limit 3" in finding for finding in found_in(lines))


def test_a_group_used_again_without_an_audit_is_named(tmp_path):
    """The host writes that the group was audited; the verdict says that it was not."""
    world = begun(tmp_path, law=TRUSTING, audit_rate=0.05)
    world.serve(WORKER)
    world.judge(world.submit(WORKER, world.lease(WORKER), draw=0.999))
    world.publish()
    world.judge(world.submit(WORKER, world.lease(WORKER), draw=0.999))
    entries = [(e.time, e.body) for e in world.audit().entries]
    last = max(place for place, (_, body) in enumerate(entries) if isinstance(body, BatchFormed))
    time, body = entries[last]
    assert body.repeated == ((0, 0), (0, 1))
    groups = ((0, 2), (0, 3), *body.groups[2:])
    entries[last] = time, msgspec.structs.replace(body, groups=groups, repeated=groups[:2])
    claimed = [
        (time, msgspec.structs.replace(body, auditor=VALIDATOR) if isinstance(body, GroupAccepted) else body)
        for time, body in entries[: last + 1]
    ]
    found = found_in(claimed)
    assert any("used version 0 slot 2 again, but no accepting verdict audited it" in finding for finding in found)
    assert any("(group_accepted) is not what the rules give here: auditor" in finding for finding in found)


def test_a_group_used_again_after_its_makers_slash_is_named(tmp_path, monkeypatch):
    """By a host whose code forgets to bar it: the log that it writes is found."""
    monkeypatch.setattr("shoal.ledger.uses.UsesRecord.bar", lambda self, places: None)
    world = court(tmp_path)
    learn(world, by=JUDGES[0])
    forged = world.submit(WORKER, world.lease(WORKER))
    for judge in JUDGES[:2]:
        world.judge(forged, "hard", by=judge)
    world.now += 4000.0
    world.do(Tick(world.now))
    learn(world, key=OTHER, by=JUDGES[0])
    rows = list(world.book.store.read())
    monkeypatch.undo()
    found = verify(rows).findings
    assert any("used version 0 slot 0 again, but its maker was slashed" in finding for finding in found)
    assert any("(batch_formed)" in finding and "follows from nothing" in finding for finding in found), found


def test_a_use_that_is_paid_again_is_named(lines):
    """Pay for the second use: the group is paid twice."""
    time = lines[-1][0]
    again = Credit(WORKER, 2, 0, 10)
    assert any("version 2 slot 0: accepted 1 times, paid 2 times" in one for one in found_in([*lines, (time, again)]))

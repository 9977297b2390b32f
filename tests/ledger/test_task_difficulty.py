"""Draws follow solve rates by rules: hand-worked numbers, what counts and when, and that no worker moves its own draws."""

import pytest

from shoal.ledger.commands import Submit, SubmitVerdict
from shoal.ledger.draw_table_changes import PoolsChanged
from shoal.ledger.errors import Wait
from shoal.ledger.log.writer import replay
from shoal.ledger.slot_draws import audit_draws, slot_of, solved_groups, table_of, turn_draws, turns
from shoal.ledger.state import state_hash
from shoal.ledger.task_difficulty import (
    SolvedGroup,
    SolvedRecord,
    TableChange,
    add_groups,
    apply_change,
    change_after,
    solve_rate,
    table_after,
)
from shoal.protocol.encoding import digest
from shoal.protocol.messages import EnvSpec, GroupVerdict, Verdict
from shoal.protocol.task_draws import DifficultyRule, EnvDraw, TaskPool
from tests.ledger.ledger_fixture import World

ENVS = [EnvDraw("easy", 1.0, 4), EnvDraw("hard", 2.0, 100)]


def rule(**changes):
    values = dict(
        curriculum=True, floor=0.1, window_groups=8, pools=True, easy=0.8, hard=0.2, easy_weight=0.5, hard_weight=0.25,
        retire_after=2, solved={"easy": 1.0, "hard": 1.0},
    )  # fmt: skip
    return DifficultyRule(**(values | changes))


def follow(groups, records, how):
    change = change_after(groups, ENVS, records, how)
    add_groups(groups, change, ENVS, records, how)
    return change


# --- by hand ---


def test_a_solve_rate_is_the_share_of_rollouts_with_the_reward_of_a_solved_one():
    assert solve_rate([1.0, 0.5, 0.0, 1.0], 1.0) == 0.5
    assert solve_rate([1.0, 0.5, 0.0, 1.0], 0.5) == 0.75
    assert solve_rate([0.1 + 0.2 + 0.7, 0.9], 1.0) == 0.5, "0.1 + 0.2 + 0.7 is a little below 1"


def test_the_weight_follows_the_mean_of_4_p_1_minus_p_as_if_four_groups_of_one_half_came_first():
    records = {}
    change = follow([SolvedGroup("hard", 3, 0.0), SolvedGroup("hard", 9, 0.25)], records, rule())
    # After the first: 1 - 1/5 = 0.8 and 0.4. After the second: 0.8 + (0.75 - 0.8) / 6, and 0.4 + (0.25 - 0.4) / 6.
    assert records["hard"].learnable == pytest.approx(0.8 - 0.05 / 6) and records["hard"].rate == pytest.approx(0.375)
    assert change.weights == {"hard": 1.58} and records["hard"].groups == 2
    assert [env.weight for env in table_after(ENVS, records, rule())] == [1.0, 1.58]


def test_weights_are_relative_to_the_environment_that_teaches_most():
    records = {"easy": SolvedRecord(90, 0.9, 0.3), "hard": SolvedRecord(90, 0.1, 0.1)}
    # Both windows are full: 0.3 + (0.36 - 0.3) / 8 = 0.3075, of which 0.1 - 0.1 / 8 = 0.0875 is 0.2846; times 2.
    change = follow([SolvedGroup("easy", 1, 0.9), SolvedGroup("hard", 1, 0.0)], records, rule())
    assert change.weights == {"hard": 0.569} and table_after(ENVS, records, rule())[0].weight == 1.0
    # The hard one does not change, but is better now than what the other has become.
    records["easy"].learnable = 0.01
    assert follow([SolvedGroup("easy", 1, 1.0)], records, rule()).weights == {"easy": 0.1, "hard": 2.0}


def test_an_environment_of_which_nothing_can_be_learned_keeps_the_floor():
    records = {}
    for _ in range(40):
        follow([SolvedGroup("easy", 1, 0.5), SolvedGroup("hard", 1, 0.0)], records, rule())
    assert [env.weight for env in table_after(ENVS, records, rule())] == [1.0, 0.2]
    assert follow([SolvedGroup("hard", 2, 0.0)], records, rule()).weights == {}, "only changes are named"


def test_half_always_solved_and_half_never_teaches_nothing_though_the_mean_is_one_half():
    records = {}
    follow([SolvedGroup("hard", task, float(task % 2)) for task in range(40)], records, rule())
    assert records["hard"].rate == pytest.approx(0.5, abs=0.1) and records["hard"].weight == 0.2  # of 2


def test_tasks_are_in_the_pool_of_their_latest_group():
    records = {}
    latest = [SolvedGroup("hard", task, rate) for task, rate in ((7, 0.1), (3, 0.2), (5, 0.5), (3, 0.9), (8, 0.8))]
    assert follow(latest, records, rule()).moved == {"hard": {"easy": (3, 8), "hard": (7,)}}
    assert table_after(ENVS, records, rule())[1].pools == (TaskPool(0.5, (3, 8)), TaskPool(0.25, (7,)))
    back = follow([SolvedGroup("hard", 3, 0.6), SolvedGroup("hard", 8, 0.9)], records, rule())
    assert back.moved == {"hard": {"normal": (3,)}}
    assert table_after(ENVS, records, rule())[1].pools == (TaskPool(0.5, (8,)), TaskPool(0.25, (7,)))


def test_a_task_is_retired_after_groups_in_a_row_that_are_solved_whole_and_stays_so():
    records, how = {}, rule()
    assert follow([SolvedGroup("hard", 3, 1.0)], records, how).moved == {"hard": {"easy": (3,)}}
    follow([SolvedGroup("hard", 3, 0.9), SolvedGroup("hard", 3, 1.0)], records, how)  # begins anew
    assert records["hard"].pools == {3: "easy"} and records["hard"].streaks == {3: 1}
    assert follow([SolvedGroup("hard", 3, 1.0)], records, how).moved == {"hard": {"retired": (3,)}}
    assert table_after(ENVS, records, how)[1].pools == (TaskPool(0.0, (3,)),)
    # Made by a version before: nothing draws it any more.
    assert follow([SolvedGroup("hard", 3, 0.0)], records, how).moved == {}


def test_the_last_task_of_a_run_is_not_retired():
    envs, records, how = [EnvDraw("easy", 1.0, 2)], {}, rule(retire_after=1)
    groups = [SolvedGroup("easy", 0, 1.0), SolvedGroup("easy", 1, 1.0)]
    assert change_after(groups, envs, records, how).moved == {"easy": {"easy": (1,), "retired": (0,)}}


def test_each_half_of_the_rules_can_be_used_alone():
    groups = [SolvedGroup("hard", 3, 1.0), SolvedGroup("easy", 3, 0.5)]
    assert change_after(groups, ENVS, {}, rule(pools=False)).moved == {}
    assert change_after(groups, ENVS, {}, rule(curriculum=False)).weights == {}


@pytest.mark.parametrize(
    "change",
    [
        TableChange({"unknown": 1.0}),
        TableChange({"easy": 0.0}),
        TableChange({"easy": -1.0}),
        TableChange(moved={"unknown": {"easy": (0,)}}),
        TableChange(moved={"easy": {"dull": (0,)}}),
        TableChange(moved={"easy": {"retired": (4,)}}),
        TableChange(moved={"easy": {"easy": (-1,)}}),
        TableChange(moved={"easy": {"retired": tuple(range(4))}, "hard": {"retired": tuple(range(100))}}),
    ],
)
def test_a_change_from_which_nothing_could_be_drawn_is_refused(change):
    with pytest.raises(ValueError, match=r"environment|retired"):
        apply_change(change, ENVS, {"easy": SolvedRecord()})


# --- in a log ---

VALIDATOR = "f" * 64
WORKERS = ["a" * 64, "b" * 64, "c" * 64]
SPECS = (
    EnvSpec("arithmetic", "", 4, 1.0, {}, own_label="easy"),
    EnvSpec("arithmetic", "", 100, 1.0, {}, own_label="hard"),
)


def reward_of(slot):
    """Of all rollouts but one, so that a group has signal where tasks are even."""
    return (1.0, 1.0, 1.0, 0.0) if slot.task % 2 == 0 else (0.0,) * 4


class Following(World):
    """A world in which draws follow solve rates. What a group earns follows from its task, not from its worker."""

    def __init__(self, tmp_path, **changes):
        tmp_path.mkdir(exist_ok=True)
        super().__init__(
            tmp_path, (VALIDATOR,), envs=SPECS, difficulty=rule(), secret=bytes(32), **({"batch_groups": 2} | changes)
        )
        for worker in WORKERS:
            self.enter(worker)
        self.publish()

    def slots(self, lease):
        stream, link = self.state.stream_of(lease), self.links[0][lease.version + 1]
        return [slot_of(self.state, stream, lease.version, number, link) for number in self.state.slots_of(lease)]

    def fill(self, lease):
        link, groups = self.links[1][lease.version + 1], tuple(digest(b"%d" % n) for n in self.state.slots_of(lease))
        name = digest(f"{lease.id} {groups}".encode())
        judges = lease, self.state.validators, link
        draws = audit_draws(self.state, lease, link)
        order, of_turns = turns(*judges), turn_draws(*judges)
        self.do(
            Submit(lease.worker, lease.id, name, 100, groups, draws, order, self.now, int(self.now), of_turns)
        )  # fmt: skip
        groups = tuple(
            GroupVerdict(slot.slot, outcome="accept", audited=True, rewards=reward_of(slot), tokens=10)
            for slot in self.slots(lease)
        )
        self.do(SubmitVerdict(VALIDATOR, Verdict(name, groups), self.now, "p" * 64, 1.0))

    def serve_until(self, worker, step):
        while step not in self.state.main.batches:
            self.fill(self.lease(worker))

    def changes(self):
        return [entry.body for entry in self.audit().entries if isinstance(entry.body, PoolsChanged)]


def test_a_version_is_drawn_from_the_groups_up_to_the_last_of_the_batch_before(tmp_path):
    world = Following(tmp_path, max_staleness=0, batch_groups=5)
    first = table_of(world.state, world.state.main, 0)
    world.serve_until(WORKERS[0], 0)
    slots, last = world.state.main.versions[0].slots, world.state.main.batches[0][-1][1]
    assert any(record.status == "flat" for record in slots.values()), "groups that teach nothing count"
    assert max(slots) > last, "a group beyond the batch does not: whether it was made depends on the workers"
    world.publish()
    link = world.links[0][1]
    counted = [slot_of(world.state, world.state.main, 0, number, link) for number in range(last + 1)]
    expected = [SolvedGroup(slot.env, slot.task, 0.75 if slot.task % 2 == 0 else 0.0) for slot in counted]
    assert solved_groups(world.state, world.state.main, 0, link) == expected
    (change,) = world.changes()
    due = change_after(expected, first, {}, rule())
    assert (change.version, change.weights, change.moved) == (1, due.weights, due.moved) and due.moved
    table = table_of(world.state, world.state.main, 1)
    assert table == table_after(first, world.state.main.solved, rule()) != first
    assert table_of(world.state, world.state.main, 0) == first, "slots of older versions keep their table"
    assert world.audit().findings == []


def test_the_order_in_which_groups_arrive_makes_no_difference_at_staleness_0(tmp_path):
    few, many = (Following(tmp_path / name, max_staleness=0, batch_groups=5) for name in ("few", "many"))
    few.serve_until(WORKERS[0], 0)
    while 0 not in many.state.main.batches:
        leases = []
        for worker in WORKERS:
            try:
                leases.append(many.lease(worker))
            except Wait:
                break
        for lease in reversed(leases):  # the later blocks come first
            many.fill(lease)
    assert list(many.state.main.versions[0].slots) != list(few.state.main.versions[0].slots)
    few.publish(), many.publish()
    assert few.changes() == many.changes() and len(few.changes()) == 1


def test_a_replay_gives_the_same_records_and_tables(tmp_path):
    world = Following(tmp_path)
    for step in range(4):
        world.serve_until(WORKERS[0], step)
        world.publish()
    state = replay(world.log_writer.store.read())
    assert state_hash(state) == state_hash(world.state) and len(state.main.changes) == 3
    for version in range(5):
        assert table_of(state, state.main, version) == table_of(world.state, world.state.main, version)


def test_with_staleness_a_version_counts_when_it_retires_and_then_whole(tmp_path):
    world = Following(tmp_path)
    for step in range(3):
        world.serve_until(WORKERS[0], step)
        world.publish()
        assert [change.version for change in world.changes()] == list(range(2, step + 2))
    counted = solved_groups(world.state, world.state.main, 1, world.links[0][2])
    assert len(counted) == len(world.state.main.versions[1].slots)
    assert world.audit().findings == []


def test_a_worker_that_holds_a_group_back_does_not_keep_it_from_counting(tmp_path):
    """It counts no matter which worker makes it in the end: the last batch that could use it waits for it."""
    counted = []
    for name in ("prompt", "holder"):
        world = Following(tmp_path / name)
        world.fill(world.lease(WORKERS[1])), world.fill(world.lease(WORKERS[2]))
        held = world.lease(WORKERS[0])
        if name == "prompt":
            world.fill(held)
        world.serve_until(WORKERS[1], 0)
        world.publish()
        if name == "holder":
            world.serve_until(WORKERS[1], 0)
            for _ in range(20):
                if 1 in world.state.main.batches:
                    break
                world.tick(5)
                try:
                    world.fill(world.lease(WORKERS[2]))
                except Wait:
                    continue
        world.serve_until(WORKERS[1], 1)
        assert held.version == 0 and all(
            slot in world.state.main.versions[0].slots for slot in world.state.slots_of(held)
        )
        world.publish()
        counted.append(set(solved_groups(world.state, world.state.main, 0, world.links[0][1])))
        maker = world.state.maker_of(world.state.main, (0, world.state.slots_of(held)[0]))
        assert (maker == WORKERS[0]) == (name == "prompt"), "another worker made what was held"
    held_groups = {SolvedGroup(slot.env, slot.task, 0.75 if slot.task % 2 == 0 else 0.0) for slot in world.slots(held)}
    assert held_groups <= counted[0] & counted[1]


def test_a_run_that_does_not_follow_solve_rates_writes_nothing_of_them(tmp_path):
    world = World(tmp_path, envs=SPECS, secret=bytes(32))
    assert b"difficulty" not in next(iter(world.log_writer.store.read()))[0]
    world.enter(WORKERS[0]), world.publish()
    for _ in range(2):
        while world.state.main.version not in world.state.main.batches:
            world.serve(WORKERS[0])
        world.publish()
    assert not any(isinstance(entry.body, PoolsChanged) for entry in world.audit().entries)
    assert [env.weight for env in table_of(world.state, world.state.main, 2)] == [1.0, 1.0]

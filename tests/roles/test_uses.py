"""Whole runs that use groups again: each group paid once, the same batches and bits after kills, and a log that holds."""

import asyncio
import random
import shutil
from collections import Counter

import pytest

from shoal.config import unsafe_changes
from shoal.launch.chosen import learned_groups
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.log.verify import report
from shoal.ledger.state import state_hash
from shoal.metrics import read_metrics
from shoal.roles.trainer.journal import Journal
from shoal.train.checkpoint import kept_versions
from shoal.tree import to_tree
from tests.roles.test_hostile_members import until
from tests.roles.test_saving import Killed
from tests.roles.town import Town, tiny_run

AGAIN = {
    "rollouts": {"max_staleness": 3, "batch_groups": 4, "block_rollouts": 16},
    "train": {"group_uses": 3, "repeated_groups": 3},
}
"""One group of a batch is new at least, and each may be in three batches."""


def uses(state):
    return Counter(place for groups in state.main.batches.values() for place in groups)


def told(town, kind):
    return [entry.body for entry in town.audit().entries if isinstance(entry.body, kind)]


def test_a_run_uses_groups_three_times_pays_each_once_and_its_log_holds(tmp_path):
    town = Town(tmp_path / "run", tiny_run(steps=5, **AGAIN))
    worker = town.worker("worker-0")
    asyncio.run(town.live(town.trainer(), town.validator(), worker))
    state, audit = town.desk.state, town.audit()
    assert report(audit).endswith("the log holds: nothing lost, nothing paid twice or used more than 3 times")
    taken = uses(state)
    assert max(taken.values()) == 3 and sum(taken.values()) == 5 * 4 > len(taken)
    paid = {(body.version, body.slot): body.tokens for body in told(town, GroupAccepted)}
    assert state.members[worker.key].credits == sum(paid.values()) and taken.keys() <= paid.keys()
    repeated = [len(batch.repeated or ()) for batch in told(town, BatchFormed)]
    assert [line["repeated_rollouts"] for line in read_metrics(town.folder.metrics)] == [8 * n for n in repeated]
    assert sum(repeated) > 0
    learned = Counter((one.version, one.slot) for _, one in learned_groups(town.folder))
    assert learned == Counter(dict.fromkeys(taken, 1)), "rejection sampling takes each group once"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_at_a_random_point_goes_on_to_batches_that_its_log_decides(tmp_path, seed):
    """All roles stop at a random event. The next coordinator replays the log to the same state, a trainer repeats its step,
    and one that learns all steps again from the log comes to the same bits."""
    config = tiny_run(steps=5, storage={"retain": "all", "state_every": 9}, **AGAIN)
    town, last = Town(tmp_path / "run", config), random.Random(seed).randrange(20, 60)
    asyncio.run(until(lambda: town.desk.state.seq >= last, town.trainer(), town.validator(), town.worker("worker-0")))
    before, formed = state_hash(town.desk.state), dict(town.desk.state.main.batches)
    town.desk.book.store.close()
    town = Town(tmp_path / "run", config)
    assert state_hash(town.desk.state) == before
    asyncio.run(town.live(Killed(town, 3), town.validator(), town.worker("worker-0")))
    after = town.desk.state.main.batches
    assert {step: after[step] for step in formed} == formed and len(after) == 5
    assert max(uses(town.desk.state).values()) > 1 and town.audit().findings == []
    weights = town.weights()
    for version in kept_versions(town.folder.trainer):
        if version:
            shutil.rmtree(town.folder.trainer / f"v{version:06d}")
    for step in list(Journal(town.folder.trainer / "journal").after(0)):
        (town.folder.trainer / "journal" / f"v{step.version:06d}.step").unlink()
    shutil.rmtree(town.folder.checkpoints)
    asyncio.run(town.live(town.trainer()))
    assert town.weights() == weights


def test_bodies_of_groups_that_may_be_used_again_stay_when_there_is_no_room_even_after_a_restart(tmp_path):
    config = tiny_run(steps=9, storage={"retain": "window", "window_steps": 1}, **AGAIN)
    town = Town(tmp_path / "run", config)

    def waits():
        """Whether the trainer has learned from a group that a later batch may have again."""
        stream = town.desk.state.main
        return stream.version >= 2 and bool(again(stream))

    asyncio.run(until(waits, town.trainer(), town.validator(), town.worker("worker-0")))
    town.desk.book.store.close()
    town = Town(tmp_path / "run", config)
    stream = town.desk.state.main
    names = {stream.versions[version].slots[slot].submission for version, slot in again(stream)}
    assert names and not town.desk.kept.make_room(0)
    assert all(map(town.desk.blobs.has, names))
    stream.uses.groups = {}
    town.desk.kept.make_room(0)
    to_come = {place for groups in stream.batches.values() for place in groups if place[0] >= stream.version - 3}
    needed = {
        stream.versions[v].slots[s].submission for v, s in to_come if stream.versions[v].slots[s].step >= stream.version
    }
    assert not any(town.desk.blobs.has(name) for name in names - needed - unlearned(stream))


def again(stream):
    """Groups that the trainer has learned from, and that a batch may take again."""
    return [
        (version, slot)
        for version, slots in stream.uses.groups.items()
        for slot in slots
        if 0 <= stream.versions[version].slots[slot].step < stream.version
    ]


def unlearned(stream):
    """Submissions with groups that no batch took yet."""
    return {stream.versions[version].slots[slot].submission for version, slot in stream.pool}


def test_a_run_file_with_other_uses_does_not_resume_a_run():
    before, after = (to_tree(tiny_run(**AGAIN | {"train": {"group_uses": n, "repeated_groups": 2}})) for n in (2, 3))
    assert unsafe_changes(before, after) == ["train.group_uses"]

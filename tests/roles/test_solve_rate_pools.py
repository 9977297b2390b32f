"""Runs whose draws follow solve rates, audited: every task is derived again, and a host that gives others is found."""

import asyncio

import msgspec
import pytest

from shoal.errors import StateError
from shoal.ledger.draw_table_changes import PoolsChanged
from shoal.ledger.log.check import report
from shoal.ledger.slot_draws import slot_of, table_of
from shoal.ledger.status import batch_of
from shoal.ledger.task_difficulty import solve_rate
from shoal.ledger.versions import LinkRevealed
from shoal.roles.auditor.rejudge_groups import AGREE, DISAGREE, GroupChoice, audit_rollouts
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.status import StatusCache
from shoal.runs.log_source import FolderRun
from shoal.step_metrics import read_metrics
from shoal.weights.manifest import weights_root
from tests.roles.forgery import forged
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

ENVS = [
    {"name": "arithmetic", "label": "easy", "args": {"digits": 1, "num_tasks": 4}, "solved": 0.1},
    {"name": "arithmetic", "label": "hard", "args": {"digits": 4, "num_tasks": 50}, "solved": 0.1},
]
"""Any number counts as solved, because this policy hardly ever finds the right one."""


def following(**changes):
    difficulty = {"curriculum": True, "window_groups": 4, "pools": True, "easy": 0.15, "hard": 0.05}
    return tiny_run(envs=ENVS, difficulty=difficulty, storage={"retain": "all"}, **changes)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A finished run."""
    testbed = RunTestbed(tmp_path_factory.mktemp("pools") / "run", following(steps=4))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("one"), testbed.worker("two")))
    return testbed


@pytest.fixture
def run_dir(ended):
    return ended.folder.root


def audit(run_dir):
    return asyncio.run(audit_rollouts(FolderRun(run_dir), GroupChoice(), threads=1, own_files=False))


def test_every_task_of_an_honest_run_is_derived_again(run_dir, tmp_path):
    found = audit(run_dir)
    assert found.exit_code() == AGREE and found.disagreements == [] and found.groups > 12
    log = audit_folder(run_dir)
    assert log.findings == [] and "the log holds" in report(log)
    changes = log.state.main.changes
    assert sorted(changes) == [1, 2, 3], "the last version has no slots"
    assert any(change.moved for change in changes.values())
    assert weights_root(run_dir / "checkpoints" / "final") == weights_of_one_file(following(steps=4), tmp_path / "one")


def test_a_run_with_staleness_is_audited_alike(tmp_path):
    config = following(steps=3, rollouts={"max_staleness": 1})
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("one"), testbed.worker("two")))
    found = audit(testbed.folder.root)
    assert found.exit_code() == AGREE and sorted(testbed.coordinator.state.main.changes) == [2]


def test_a_host_that_gives_easier_tasks_than_the_table_says_is_found(tmp_path, monkeypatch):
    """Its workers and validators believe their leases; the log holds; the seeds say otherwise."""
    honest = Coordinator.wire_lease

    def easier(coordinator, lease):
        asked = honest(coordinator, lease)
        blocks = tuple(
            msgspec.structs.replace(
                block,
                slots=tuple(msgspec.structs.replace(slot, env="easy", task=slot.task % 4) for slot in block.slots),
            )
            for block in asked.blocks
        )
        return msgspec.structs.replace(asked, blocks=blocks)

    monkeypatch.setattr(Coordinator, "wire_lease", easier)
    testbed = RunTestbed(tmp_path / "run", following(steps=2))
    worker = testbed.worker("one")
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    assert testbed.coordinator.state.members[worker.key].refused == 0
    found = audit(testbed.folder.root)
    assert found.exit_code() == DISAGREE
    assert any("another task than the slot's" in line or "another environment" in line for line in found.disagreements)


def changed(**fields):
    """An edit that replaces fields of the last change of draws by what each is made of it."""

    def edit(lines):
        place = max(i for i, (_, body) in enumerate(lines) if isinstance(body, PoolsChanged))
        time, body = lines[place]
        new = msgspec.structs.replace(body, **{name: make(body) for name, make in fields.items()})
        return [*lines[:place], (time, new), *lines[place + 1 :]]

    return edit


def without_changes(lines):
    return [line for line in lines if not isinstance(line[1], PoolsChanged)]


def one_more(lines):
    place = max(i for i, (_, body) in enumerate(lines) if isinstance(body, PoolsChanged))
    time, body = lines[place]
    extra = msgspec.structs.replace(body, version=body.version + 7, weights={"easy": 50.0}, moved={})
    return [*lines[: place + 1], (time, extra), *lines[place + 1 :]]


def withheld(lines):
    """The link of the count is invented, and the true one is never revealed."""
    place = max(i for i, (_, body) in enumerate(lines) if isinstance(body, PoolsChanged))
    version = lines[place][1].version - 1
    return [
        line
        for line in changed(link=lambda _: "ab" * 32)(lines)
        if not (isinstance(line[1], LinkRevealed) and line[1].version == version)
    ]


LIES = {
    "another weight": (changed(weights=lambda body: {**body.weights, "easy": 9.0}), "not what the rules give"),
    "a task moved that was not": (changed(moved=lambda body: {"hard": {"easy": (0, 1)}}), "not what the rules give"),
    "an invented link, the true one withheld": (withheld, "does not lead to the published end"),
    "no link": (changed(link=lambda _: ""), "does not lead to the published end"),
    "no changes of draws": (without_changes, "due is pools_changed"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_log_with_other_draws_is_found_though_every_hash_fits(run_dir, tmp_path, lie):
    edit, words = LIES[lie]
    findings = audit_folder(forged(run_dir, tmp_path / "lying", edit)).findings
    assert any(words in finding for finding in findings), findings


UNBOOKABLE = {
    "a task that there is not": changed(moved=lambda body: {"hard": {"easy": (50,)}}),
    "an unknown pool": changed(moved=lambda body: {"hard": {"dull": (1,)}}),
    "an unknown environment": changed(weights=lambda body: {"none": 1.0}),
    "a negative weight": changed(weights=lambda body: {"easy": -1.0}),
    "no task left": changed(
        moved=lambda body: {"easy": {"retired": tuple(range(4))}, "hard": {"retired": tuple(range(50))}}
    ),
    "a version twice": changed(version=lambda body: body.version - 1),
    "a version that there is not": one_more,
    "a link that is no hex": changed(link=lambda _: "link"),
}


@pytest.mark.parametrize("lie", UNBOOKABLE)
def test_a_change_of_draws_that_no_state_can_take_breaks_the_log(run_dir, tmp_path, lie):
    with pytest.raises(StateError, match="the log is broken at event"):
        audit_folder(forged(run_dir, tmp_path / "lying", UNBOOKABLE[lie]))


# --- solve rates are measured in every run ---


def test_metrics_have_the_solve_rate_and_weight_of_each_environment(ended):
    state, lines = ended.coordinator.state, read_metrics(ended.folder.metrics)
    for line in lines:
        found, step = {"easy": [], "hard": []}, line["step"]
        for number, record in state.main.versions[step].slots.items():
            slot = slot_of(state, state.main, step, number, ended.coordinator.slot_links[step + 1])
            if number <= state.main.batches[step][-1][1]:
                found[slot.env].append(solve_rate(record.rewards, 0.1))
        both = found["easy"] + found["hard"]
        if len(both) == len(state.main.versions[step].slots):  # else some were accepted after the batch
            assert line["solve_rate"] == pytest.approx(sum(both) / len(both))
            for label, rates in found.items():
                assert line[f"solve_rate/{label}"] == (pytest.approx(sum(rates) / len(rates)) if rates else None)
        table = table_of(state, state.main, step)
        assert [line[f"draw_weight/{env.label}"] for env in table] == [env.weight for env in table]
    assert len({line["draw_weight/hard"] for line in lines}) > 1


def test_one_environment_has_one_solve_rate_and_a_restarted_coordinator_none_for_a_step(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(steps=1, envs=ENVS[:1]))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("one")))
    (line,) = read_metrics(testbed.folder.metrics)
    assert 0 < line["solve_rate"] < 1 and not any("/" in name for name in line)
    again = open_run(testbed.folder, testbed.config)
    batch = batch_of(again.state, 0)
    assert StatusCache(again).with_solve_rates(batch) == batch and batch.solved == {}

"""A run that draws from a list of tasks: same bytes for everybody, in the log, and no other list passes for it."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from shoal.envs.load import env_digest
from shoal.errors import ConfigError, StateError
from shoal.ledger.event import GENESIS
from shoal.ledger.event_types import make_entry
from shoal.ledger.log.check import verify
from shoal.ledger.run_events import RunCreated
from shoal.protocol.encoding import to_json
from shoal.protocol.task_draws import TaskList
from shoal.roles.coordinator.main import open_run
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

ARGS = {"digits": 1}
LISTED = tuple(range(5, 400, 7))


def listed(place: Path, tasks: tuple[int, ...] = LISTED, args: dict[str, int] = ARGS) -> TaskList:
    """Write a list for the sums of one digit."""
    found = TaskList(env_digest("arithmetic"), args, 1 << 16, tasks)
    (place / "tasks.json").write_bytes(to_json(found))
    return found


def config_with(place: Path, **changes: object):
    return tiny_run(envs=[{"name": "arithmetic", "args": ARGS, "tasks": str(place / "tasks.json")}], **changes)


def findings(created: RunCreated) -> list[str]:
    entry = make_entry(0, 1.0, created, GENESIS)
    return verify([(entry.data, entry.hash)]).findings


def test_a_run_on_a_list_gives_the_bytes_of_one_file_and_its_audit_draws_the_same(tmp_path: Path) -> None:
    found, config = listed(tmp_path), config_with(tmp_path, steps=2)
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker")))
    audit, out = testbed.audit(), tmp_path / "one"
    assert audit.findings == [] and audit.entries[0].body.task_lists == {"arithmetic": found}
    assert testbed.weights() == weights_of_one_file(config, out)


def test_a_list_of_another_environment_is_refused_when_the_run_begins(tmp_path: Path) -> None:
    listed(tmp_path, args={"digits": 2})
    with pytest.raises(
        ConfigError, match="task list of environment arithmetic cannot be used: it was measured on another"
    ):
        RunTestbed(tmp_path / "run", config_with(tmp_path))


def test_a_run_does_not_go_on_with_another_list(tmp_path: Path) -> None:
    listed(tmp_path)
    testbed = RunTestbed(tmp_path / "run", config_with(tmp_path))
    other = listed(tmp_path, tasks=(1, 2, 3))
    with pytest.raises(StateError, match=r"the run file differs .* in envs"):
        testbed.folder.prepare(config_with(tmp_path), tmp_path)
    (kept,) = testbed.folder.task_lists.iterdir()
    kept.write_bytes(to_json(other))
    with pytest.raises(StateError, match="has the digest"):
        open_run(testbed.folder, testbed.config)
    env = replace(testbed.config.envs[0], tasks=other.digest)
    kept.rename(kept.with_name(f"{other.digest}.json"))
    with pytest.raises(StateError, match="are not those that the log began with"):
        open_run(testbed.folder, replace(testbed.config, envs=(env,)))


def test_a_path_without_a_list_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"envs\.tasks = .*: no task list of a filter stage: No such file"):
        RunTestbed(tmp_path / "run", config_with(tmp_path))


def test_a_first_event_whose_list_does_not_fit_is_a_finding(tmp_path: Path) -> None:
    found = listed(tmp_path)
    created = RunTestbed(tmp_path / "run", config_with(tmp_path)).audit().entries[0].body
    assert isinstance(created, RunCreated) and findings(created) == []
    other = replace(found, tasks=(1, 2, 3))
    faults = {
        "its digest is": replace(created, task_lists={"arithmetic": other}),
        "measured on another environment": replace(created, task_lists={"arithmetic": replace(found, args={})}),
        "not ascending": replace(created, task_lists={"arithmetic": replace(found, tasks=(3, 2))}),
        "the run file names one, and the event has none": replace(created, task_lists={}),
        "there is no such environment": replace(created, task_lists=created.task_lists | {"sums": found}),
        "and the run file names none": replace(created, config=created.config | {"envs": [7]}),
    }
    for said, lying in faults.items():
        assert any(said in finding for finding in findings(lying)), said

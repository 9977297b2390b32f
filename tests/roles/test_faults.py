"""Whole runs whose environment fails on some answers: the same bytes, and pauses."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from shoal.config import ValidatorsConfig
from shoal.envs.load import env_digest
from shoal.errors import StateError
from shoal.ledger.batches import GroupAccepted
from shoal.ledger.commands import Admin
from shoal.ledger.errors import Refused
from shoal.ledger.status import batch_of
from shoal.ledger.verdicts import VerdictGiven
from shoal.protocol.encoding import to_json, to_msgpack
from shoal.protocol.messages import AdminRequest, Faults, GroupRecord, GroupVerdict, Record, RolloutRecord, Verdict
from shoal.protocol.task_draws import TaskList
from shoal.roles.coordinator.status import StatusCache
from shoal.roles.coordinator.verdict_uploads import MAX_REPORTED, _demand_recorded_faults, _is_new
from shoal.roles.node.session import SOONEST_S
from shoal.step_metrics import read_metrics
from tests.envs import brittle
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file


def brittle_run(kind="episodes", algorithm=None, on_fault="", **args):
    env = {"name": brittle.__file__, "kind": kind, "args": args, "on_fault": on_fault}
    return tiny_run(envs=[env], steps=2, train={"algorithm": algorithm or {"name": "grpo", "advantage": "mean_std"}})


@pytest.mark.parametrize(("kind", "args", "algorithm"), [
    ("episodes", {}, None), ("completions", {"compared": True, "every": 24}, None),
    ("episodes", {}, {"name": "composition", "average": "rollouts", "mask_overlong": True}),
], ids=["episodes", "compared", "divided-by-rollouts"])  # fmt: skip
def test_a_run_whose_environment_fails_at_times_gives_the_bytes_of_one_file(tmp_path, kind, args, algorithm):
    """Its rollouts are left out by the trainer, and all of them are paid."""
    config = brittle_run(kind, algorithm, **args)
    expected = weights_of_one_file(config, tmp_path / "one")
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(
        testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0"), testbed.worker("worker-1"))
    )
    assert testbed.weights() == expected
    audit = testbed.audit()
    assert audit.findings == []
    accepted = [entry.body for entry in audit.entries if isinstance(entry.body, GroupAccepted)]
    failed = [body for body in accepted if body.faults]
    assert failed and all("KeyError" in body.faults.said or "alike" in body.faults.said for body in failed)
    assert all(group.audited for entry in audit.entries if isinstance(entry.body, VerdictGiven)
               for group in entry.body.groups if group.faults)  # fmt: skip
    assert any(member.faults for step in range(2) for member in batch_of(audit.state, step).groups)
    assert sum(node.credits for node in audit.state.members.values()) == sum(body.tokens for body in accepted)
    lines = read_metrics(testbed.folder.metrics)
    assert any(0 < line.get("fault_share", 0) < 0.2 and line["fault_rollouts"] > 0 for line in lines)


@pytest.mark.parametrize("kind", ["episodes", "completions"])
def test_with_lowest_a_run_learns_from_failed_rollouts_and_counts_them(tmp_path, kind):
    roots = [weights_of_one_file(brittle_run(kind, on_fault=how), tmp_path / f"one{how}") for how in ("", "lowest")]
    testbed = RunTestbed(tmp_path / "run", brittle_run(kind, on_fault="lowest"))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert testbed.weights() == roots[1] != roots[0]
    assert not any(isinstance(e.body, GroupAccepted) and e.body.faults for e in testbed.audit().entries)
    lines = read_metrics(testbed.folder.metrics)
    assert any(0 < line.get("fault_share", 0) < 0.5 and line["fault_rollouts"] > 0 for line in lines)


@pytest.mark.parametrize(("kind", "args", "why"), [
    ("episodes", {"every": 2}, "environment faults: brittle fails on "),
    ("completions", {"every": 0, "outside": 4}, "environment faults: brittle gives a score of 2.0, outside its"),
], ids=["raises", "outside-at-the-host"])  # fmt: skip
@pytest.mark.parametrize(
    "tasks", [pytest.param((), id="tasks"), pytest.param((3,), id="one-task", marks=pytest.mark.slow)]
)
def test_a_run_whose_environment_fails_often_pauses_and_says_why(tmp_path, kind, args, why, tasks, caplog):
    """If all of it is in one task, the sentence names the task. Where the host plays, its only validator is another's."""
    config = replace(brittle_run(kind, **args), validators=ValidatorsConfig(count=int(kind == "episodes")))
    if tasks:
        (tmp_path / "tasks.json").write_bytes(to_json(TaskList(env_digest(brittle.__file__), args, 16, tasks)))
        config = replace(config, envs=(replace(config.envs[0], tasks=str(tmp_path / "tasks.json")),))
    with pytest.raises(StateError, match=why):
        weights_of_one_file(config, tmp_path / "one")
    testbed = RunTestbed(tmp_path / "run", config)
    validator = testbed.validator()
    caplog.set_level("INFO", "validator")
    if kind == "completions":
        testbed.coordinator.log_writer.write(
            Admin("admit", AdminRequest(validator.client.key.public), testbed.clock()), testbed.clock()
        )

    def told():
        return [one.getMessage() for one in caplog.records if one.name == "validator"]

    async def scenario():
        roles = [asyncio.create_task(role.run()) for role in (testbed.trainer(), validator, testbed.worker("w"))]
        async with asyncio.timeout(60):
            while testbed.coordinator.state.phase == "running":
                await asyncio.sleep(0.02)
            while not any(line.startswith("waiting reason=") and why in line for line in told()):
                await asyncio.sleep(0.02)
        await asyncio.sleep(3 * SOONEST_S)
        assert len([line for line in told() if line.startswith("waiting reason=")]) == 1
        status = StatusCache(testbed.coordinator).status()
        for role in roles:
            role.cancel()
        await asyncio.gather(*roles, return_exceptions=True)
        return status

    status = asyncio.run(scenario())
    assert status.pause_cause.startswith(why) and status.waiting_for.startswith(f"the host: {why}")
    named = "all of task 3 of brittle: repair it, or leave it out"
    assert (named in status.waiting_for) == bool(tasks) and (" of task " in status.waiting_for) == bool(tasks)
    if args["every"]:
        assert "brittle.py line" in status.pause_cause and "KeyError" in status.pause_cause
    again = testbed.audit()
    assert again.findings == [] and (again.state.phase, again.state.pause_cause) == ("paused", status.pause_cause)


@pytest.mark.parametrize(("faults", "slot", "refused"), [
    (Faults((1,)), 7, False), (Faults(outside=(2,), score=9.0), 7, False), (Faults((1,), (2,), 2.0), 7, False),
    (Faults((0, 1)), 7, True), (Faults((1,), (1,)), 7, True), (Faults((1,)), 6, True),
])  # fmt: skip
def test_a_verdict_names_no_fault_that_the_hosts_stage_did_not_record(faults, slot, refused):
    """Else one validator alone could pause the run."""
    played = (RolloutRecord("a", "environment", 1.0), RolloutRecord("b", "error", 0.0, fault="KeyError"),
              RolloutRecord("c", "environment", 0.0, outside=2.0))  # fmt: skip
    blobs = {"r": to_msgpack(Record("run", "lease", 0, (GroupRecord(7, played),)))}
    submission = SimpleNamespace(record="r", decided=False, digest="s")
    verdict = Verdict("s", (GroupVerdict(slot, True, "accept", faults=faults), GroupVerdict(8, True, "accept")))
    with pytest.raises(Refused, match="did not record") if refused else nullcontext():
        _demand_recorded_faults(SimpleNamespace(state=None, blobs=blobs), submission, verdict)


def test_a_coordinator_remembers_a_bounded_number_of_causes_of_void_slots() -> None:
    reported: dict[str, None] = {}
    assert [_is_new(cause, reported) for cause in ("first", "first")] == [True, False]
    assert all(_is_new(str(number), reported) for number in range(MAX_REPORTED)) and len(reported) == MAX_REPORTED
    assert _is_new("first", reported), "it was forgotten"

"""What a Prometheus server is told: every figure with its type and sentence, few series, and pages that cost little."""

import asyncio
import json
from statistics import pstdev

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed

from shoal.alarms import Alarm, AlarmsLog
from shoal.ledger.commands import JoinRun
from shoal.ledger.members import ValidatorFault, apply_validator_fault
from shoal.ledger.status import batch_of
from shoal.protocol import messages as t
from shoal.protocol.encoding import digest, from_json
from shoal.roles.coordinator.prometheus import (
    MAX_VALUES,
    PAGES_SHARE,
    PREFIX,
    WAITED_FOR,
    WATCHED,
    Meter,
    PrometheusCollector,
    step_metrics,
)
from shoal.roles.coordinator.status import StatusCache
from shoal.step_metrics import METRICS
from tests.ledger.ledger_fixture import VALIDATOR, World
from tests.roles.testbed import URL, RunTestbed, tiny_run


@pytest.fixture
def testbed(tmp_path):
    return RunTestbed(tmp_path / "run", tiny_run())


def get(testbed, *paths, accept="text/plain"):
    """Bodies of some answers, in order."""

    async def scenario():
        transport = httpx.ASGITransport(testbed.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers={"accept": accept}) as client:
            return [(await client.get(path)).text for path in paths]

    return asyncio.run(scenario())


def samples(text):
    """Values by name and labels."""
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in parsed(text)
        for sample in family.samples
    }


def fill(testbed):
    """A folder with everything that a page shows."""
    step = {name: 0.5 for name in METRICS if "/" not in name} | {"step": 7, "staleness_rollouts": {"0": 12, "1": 4}}
    step |= {"waiting_for": "batch", "reward_mean/easy": 0.75, "env_metric/wins": 3.0, "kl_nats": None}
    testbed.folder.metrics.write_text(json.dumps({"step": 6}) + "\n" + json.dumps(step) + "\n")
    testbed.folder.evaluations.mkdir(exist_ok=True)
    for name, mean in (("before", 0.25), ("v000002", 0.5)):
        found = {"mean": mean, "low95": mean - 0.1, "high95": mean + 0.1, "episodes": 64}
        found["judge"] = {"mean": mean / 2, "low95": 0.0, "high95": 1.0}
        (testbed.folder.evaluations / f"{name}.json").write_text(json.dumps(found | {"envs": {"easy": found}}))
    for number in range(2):
        join = t.Join("worker", f"w{number}", 0.0, "x", "float32", "cpu")
        testbed.coordinator.log_writer.write(JoinRun(digest(b"%d" % number), join, 0.0), 0.0)


def test_a_page_has_the_figures_of_the_run_its_evaluations_and_its_newest_step(testbed):
    fill(testbed)
    found = samples(get(testbed, "/metrics")[0])
    assert found["shoal_phase", "phase=running"] == 1 and found["shoal_phase", "phase=paused"] == 0
    assert found["shoal_version",] == -1 and found["shoal_steps",] == 3
    assert found["shoal_nodes", "role=worker", "standing=new"] == 2
    assert found["shoal_groups_refused_total", "check=sampling"] == 0
    assert found["shoal_events_total",] == 3 and found["shoal_disk_free_bytes",] > 0
    assert found["shoal_heldout_mean", "env=", "of=first"] == 0.25
    assert found["shoal_heldout_low95", "env=easy", "of=newest"] == 0.4
    assert (
        found["shoal_heldout_judge_mean", "of=first"] == 0.125
        and found["shoal_heldout_judge_mean", "of=newest"] == 0.25
    )
    assert found["shoal_step",] == 7 and found["shoal_step_seconds",] == 0.5
    assert found["shoal_step_reward_mean", "env="] == 0.5 and found["shoal_step_reward_mean", "env=easy"] == 0.75
    assert found["shoal_step_staleness_rollouts", "versions=1"] == 4
    assert found["shoal_step_env_metric", "name=wins"] == 3 and ("shoal_step_kl_nats",) not in found


def test_every_metric_that_is_declared_comes_with_its_type_and_sentence_in_both_formats(testbed):
    fill(testbed)
    told = WATCHED | {of_step.name: of_step.watched for of_step in step_metrics().values()}
    (text,), (exact,) = (
        get(testbed, "/metrics"),
        get(testbed, "/metrics", accept="application/openmetrics-text;version=1.0.0"),
    )
    missing = ("step_kl_nats", "step_solve_rate", "step_draw_weight", "step_reward_part", "time_left_seconds",
               "reward_spread")  # fmt: skip
    for families in (list(parsed(text)), list(parsed_openmetrics(exact))):
        found = {family.name: family for family in families}
        for name, metric in told.items():
            if name in missing:
                continue
            family = found.get(PREFIX + name) or found[PREFIX + name.removesuffix("_total").removesuffix("_info")]
            assert family.documentation == metric.sentence and family.type in (metric.kind, "gauge"), name


def test_the_units_are_told_to_a_server_that_reads_openmetrics(testbed):
    fill(testbed)
    units = {
        f.name: f.unit for f in parsed_openmetrics(get(testbed, "/metrics", accept="application/openmetrics-text")[0])
    }
    assert units["shoal_blob_bytes"] == "bytes" and units["shoal_step_clip_ratio"] == "ratio"


def test_the_one_who_is_waited_for_has_the_seconds(tmp_path):
    now = [1000.0]
    testbed = RunTestbed(tmp_path / "run", tiny_run(), clock=lambda: now[0])
    exposed = PrometheusCollector(testbed.coordinator, StatusCache(testbed.coordinator), Meter(), clock=lambda: now[0])
    exposed.page("")
    now[0] += 90.0
    found = samples(exposed.page("")[0].decode())
    waits = {on: found["shoal_waiting_seconds", f"on={on}"] for on in WAITED_FOR}
    assert waits == {"nothing": 0, "host": 0, "trainer": 90, "validators": 0, "workers": 0}


def test_what_a_run_has_left_how_rewards_spread_and_who_was_found_at_fault(testbed, tmp_path):
    """On a log with batches: the testbed's own has none."""
    worker = digest(b"worker")
    (tmp_path / "world").mkdir()
    world = World(tmp_path / "world", steps=20)
    world.enter(worker)
    world.publish()
    while world.state.main.version not in world.state.main.batches:
        world.serve(worker)
    for _ in range(2):
        apply_validator_fault(ValidatorFault(VALIDATOR, "s", "outvoted"), world.state, None)
    cheater = world.state.members[worker]
    cheater.standing, cheater.last_reason = "quarantined", "sampling: gap 2.3"
    testbed.coordinator.log_writer = world.log_writer
    steps = [{"step": i, "step_s": 3.0, "staleness_rollouts": {"0": 3, "2": 1}} for i in range(4)]
    testbed.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    found = samples(
        PrometheusCollector(testbed.coordinator, StatusCache(testbed.coordinator), Meter()).page("")[0].decode()
    )
    assert found["shoal_time_left_seconds",] == (20 - world.state.main.version) * 3.0
    assert found["shoal_staleness_mean_versions",] == 0.5
    rewards = [reward for group in batch_of(world.state, 0).groups for reward in group.rewards]
    assert found["shoal_reward_spread",] == pytest.approx(pstdev(rewards)) and len(set(rewards)) > 1
    assert found["shoal_validators_differed",] == 1 and found["shoal_validator_faults_total",] == 2
    causes = {key[1]: value for key, value in found.items() if key[0] == "shoal_nodes_quarantined"}
    assert causes["cause=sampling"] == 1 == sum(causes.values())
    for reason, cause in (
        ("sampling or logprobs: more noise over time than honest arithmetic makes", "noise"),
        ("forged, as a second look found", "forged"),
        ("the host asked for it", "host"),
        ("evil\x1b: text", "other"),
    ):
        cheater.last_reason = reason
        found = samples(
            PrometheusCollector(testbed.coordinator, StatusCache(testbed.coordinator), Meter()).page("")[0].decode()
        )
        assert found["shoal_nodes_quarantined", f"cause={cause}"] == 1


@pytest.mark.parametrize("changes", [["raised"], ["raised", "cleared"]])
def test_alarms_of_the_runs_folder_are_told_while_they_stand(testbed, changes):
    log_writer = AlarmsLog(testbed.folder.alarms)
    for change in changes:
        log_writer.write(change, Alarm("collapse", "warning", 3, 4, "The reward fell.", "Pause the run."), 7.0)
    page, status = get(testbed, "/metrics", "/v1/status")
    assert (("shoal_alarm", "cause=collapse", "severity=warning") in samples(page)) == (changes == ["raised"])
    told = [t.StandingAlarm("collapse", "warning", 3)] if changes == ["raised"] else []
    assert list(from_json(status.encode(), t.Status).alarms) == told


def test_requests_are_counted_by_call_and_unknown_paths_make_no_series(testbed):
    paths = ["/v1/status", "/v1/nodes/stranger", *(f"/no/such/{number}" for number in range(20))]
    found = samples(get(testbed, *paths, "/metrics")[-1])
    assert found["shoal_requests_total", "call=GET /v1/status", "status=2xx"] == 1
    assert found["shoal_requests_total", "call=GET /v1/nodes/{key}", "status=4xx"] == 1
    assert found["shoal_request_seconds_count", "call=GET /v1/status"] == 1
    assert found["shoal_answer_bytes_sum", "call=GET /v1/status"] > 100
    assert not any("such" in label for key in found for label in key)


def test_no_series_has_the_name_or_the_key_of_a_node(testbed):
    key = digest(b"stranger")
    testbed.coordinator.log_writer.write(
        JoinRun(key, t.Join("worker", "mallory", 0.0, "x", "float32", "cpu"), 0.0), 0.0
    )
    page = get(testbed, "/metrics")[0]
    assert key[:16] not in page and "mallory" not in page


def test_names_that_an_environment_chose_are_few_short_and_harmless(testbed):
    names = ['evil"} 1\nshoal_version 99', "x" * 500, "\x1b[2J", *(f"metric-{number}" for number in range(1000))]
    line = {"step": 1} | {f"env_metric/{name}": 1.0 for name in names}
    testbed.folder.metrics.write_text(json.dumps(line) + "\n")
    found = samples(get(testbed, "/metrics")[0])
    mine = [key[1] for key in found if key[0] == "shoal_step_env_metric"]
    assert len(mine) == MAX_VALUES and max(map(len, mine)) < 80 and found["shoal_version",] == -1
    assert not any("\x1b" in label or "\n" in label for label in mine)


def test_a_page_is_made_once_a_second_and_more_seldom_if_that_takes_long(testbed):
    now, cost_s, pages = [100.0], [0.0], []

    def alarms():
        pages.append(now[0])
        now[0] += cost_s[0]
        return ()

    exposed = PrometheusCollector(
        testbed.coordinator, StatusCache(testbed.coordinator), Meter(), alarms, clock=lambda: now[0]
    )
    for _ in range(500):
        exposed.page("")
    assert len(pages) == 1
    now[0], cost_s[0] = 101.5, 0.05
    for _ in range(500):
        exposed.page("")
    assert len(pages) == 2
    now[0] = 101.5 + 0.05 / PAGES_SHARE - 0.1
    exposed.page("")
    now[0] += 0.2
    exposed.page("")
    assert len(pages) == 3

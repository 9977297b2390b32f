"""Dashboard and alert rules in deploy/watch: they name metrics that exist, and a real server has data for all panels."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.config.alarm_limits import CAUSES
from shoal.ledger.commands import Admin
from shoal.ledger.log.sqlite_store import Store, sqlite_url
from shoal.ledger.log.writer import LogWriter
from shoal.protocol.messages import AdminRequest
from shoal.roles.coordinator.prometheus import PREFIX, WATCHED, step_metrics
from shoal.run_folder import RunFolder
from shoal.step_metrics import read_metrics
from tests.roles.test_logger import tensorboard_points, trackio_rows

ROOT = Path(__file__).parent.parent
WATCH = ROOT / "deploy" / "watch"
ALERTS, ALERT_TESTS = WATCH / "alerts.yml", WATCH / "alerts_test.yml"
DASHBOARD = json.loads((WATCH / "grafana.json").read_text())

PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
"""Metrics that prometheus_client adds."""

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")), reason="needs Prometheus: make prometheus"
)


def panels() -> Iterator[tuple[str, str]]:
    """Each query of the dashboard, with its panel's title."""
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))


def names_in(query: str) -> set[str]:
    found = set(re.findall(r"\b(?:shoal|process)_[a-z0-9_]+", re.sub(r"\{[^}]*\}", "", query)))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def told() -> set[str]:
    return {PREFIX + name for name in (*WATCHED, *(of_step.name for of_step in step_metrics().values()))} | PROCESS


def alerts() -> list[str]:
    return re.findall(r"^ +- alert: (\w+)$", ALERTS.read_text(), re.MULTILINE)


def test_every_panel_asks_for_metrics_that_the_coordinator_has():
    unknown = {(title, name) for title, query in panels() for name in names_in(query) - told()}
    assert unknown == set() and len(list(panels())) > 30


def test_every_alert_asks_for_metrics_that_the_coordinator_has_and_is_tested():
    rules = " ".join(re.findall(r"expr: (.*)", ALERTS.read_text()))
    assert names_in(rules) - told() == set()
    assert [name for name in alerts() if name not in ALERT_TESTS.read_text()] == []


def test_each_alarm_of_a_run_is_among_the_tests_of_the_rules():
    tested = set(re.findall(r'shoal_alarm\{.*cause="(\w+)"', ALERT_TESTS.read_text()))
    assert tested == CAUSES.keys()


@needs_prometheus
def test_promtool_accepts_the_rules_and_each_fault_raises_its_alarm_alone():
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=WATCH, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# --- a real run, scraped by a real Prometheus ---

RUN_FILE = """
name = "watched"
steps = 400
seed = 1
[policy.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
mlp_width = 64
max_positions = 32
[[envs]]
name = "arithmetic"
args = { digits = 1, operations = "+" }
[sampling]
max_turn_tokens = 4
max_tokens = 24
[rollouts]
group_size = 8
block_rollouts = 64
batch_groups = 4
[workers]
count = 1
cheating = 4  # each failure keeps a key away twice as long: one key would soon be a small share of what is refused
[eval]
episodes = 32
[storage]
checkpoint_every = 10
[verify]
quarantine_s = 0.1  # so that the cheaters go on
[monitors.limits]
"disk.free_mb" = 1e9  # so that an alarm is raised
[logging]
to = ["jsonl", "tensorboard", "trackio", "wandb"]
format = "json"
"""


class Scraping:
    """A Prometheus server that asks one coordinator every second, with the shipped rules."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        # The rules wait for minutes before they fire, and promtool tests that: here a fault has to fire them at once.
        (folder / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 0s", ALERTS.read_text()))
        config = (WATCH / "prometheus.yml").read_text().replace("15s", "1s").replace("127.0.0.1:8470", target)
        (folder / "prometheus.yml").write_text(config)
        self.target = target
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=error"],
        )  # fmt: skip

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples that a query finds now."""
        with contextlib.suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{self._port}/api/v1/query"
            answer = httpx.get(url, params={"query": query}, trust_env=False, timeout=5.0).json()
            assert answer["status"] == "success", (query, answer)
            return list(answer["data"]["result"])
        return []

    def firing(self) -> set[str]:
        return {found["metric"]["alertname"] for found in self.ask('ALERTS{alertstate="firing"}')}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


AFTER_A_RESTART = {"ShoalClockBehind", "ShoalQuotaUsed"}


def fired(scraping: Scraping) -> set[str]:
    """Alarms that were ever raised: the share of refusals is largest while little was accepted."""
    return {found["metric"]["alertname"] for found in scraping.ask('max_over_time(ALERTS{alertstate="firing"}[1h])')}


def book_an_hour_ahead(folder: Path) -> None:
    """What a host's log has if its clock was an hour ahead, and was then set right."""
    log_writer, ahead = LogWriter(Store(sqlite_url(folder / "log.sqlite"))), time.time() + 3600
    for action in ("pause", "resume"):
        log_writer.write(Admin(action, AdminRequest(), ahead), ahead)
    log_writer.store.close()


MOST_S = 120.0
"""A panel's figure or an alert may take so long: some need several scrapes, and steps become rarer on a busy machine."""


def until(what: str, holds: Callable[[], object], run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + MOST_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {MOST_S:g} s for {what}"
        assert run.poll() is None, f"the run ended while waiting for {what}"
        time.sleep(0.5)


@needs_prometheus
@pytest.mark.slow
def test_a_real_prometheus_gets_data_for_every_panel_and_faults_fire_alerts(tmp_path):
    for package in ("wandb", "trackio", "tensorboard"):
        pytest.importorskip(package)
    (tmp_path / "watched.toml").write_text(RUN_FILE)
    folder = tmp_path / "runs" / "watched"
    shoal = [sys.executable, "-m", "shoal.cli.main"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(*values: str) -> subprocess.Popen[bytes]:
        options = [word for value in (f"host.port={port}", *values) for word in ("--set", value)]
        with (tmp_path / "said.txt").open("ab") as said:
            return subprocess.Popen([*shoal, "run", "watched.toml", *options], cwd=tmp_path, stdout=said, stderr=said)

    run = start()
    scraping: Scraping | None = None
    try:
        until("the coordinator", (folder / "coordinator.json").exists, run)
        scraping = Scraping(tmp_path, f"127.0.0.1:{port}")
        until("an evaluation on the way", lambda: list((folder / "eval").glob("v*.json")), run)

        def still_empty() -> list[tuple[str, str]]:
            """Panels that have had no data so far. Some steps lack some figures."""
            for title, query in list(unseen):
                asked = query.replace("$instance", scraping.target).replace("$__rate_interval", "30s")
                if scraping.ask(asked):
                    unseen.remove((title, query))
            return unseen

        unseen = list(panels())
        with contextlib.suppress(AssertionError):
            until("data for every panel", lambda: not still_empty(), run)
        assert unseen == []
        assert not scraping.firing() & ({"ShoalPaused", "ShoalNoWorkers", "ShoalDown"} | AFTER_A_RESTART)
        until("the alarms of cheaters and of a disk", lambda: {"ShoalRefusals", "ShoalAlarm"} <= fired(scraping), run)
        for action, node, alarm in (
            ("pause", "", "ShoalPaused"),
            ("resume", "", ""),
            ("kick", "worker-0", ""),
            *(("kick", f"cheater-{number}", "ShoalNoWorkers" if number == 3 else "") for number in range(4)),
        ):
            command = [*shoal, "admin", action, str(folder), *([node] if node else [])]
            subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
            until(f"{alarm} after {action}", lambda alarm=alarm: not alarm or alarm in scraping.firing(), run)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130, (tmp_path / "said.txt").read_text()
        deadline = time.monotonic() + 20
        while "ShoalDown" not in scraping.firing():
            assert time.monotonic() < deadline, "a coordinator that is gone raises no alarm"
            time.sleep(0.5)
        book_an_hour_ahead(folder)
        (folder / "blobs" / "ff").mkdir(exist_ok=True)
        (folder / "blobs" / "ff" / ("f" * 64)).write_bytes(bytes(2_000_000))
        run = start("storage.quota_mb=1")
        until("the alarms of clock and quota", lambda: scraping.firing() >= AFTER_A_RESTART, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130, (tmp_path / "said.txt").read_text()
    finally:
        run.kill()
        if scraping is not None:
            scraping.close()
    lines = {line["step"]: line["reward_mean"] for line in read_metrics(folder / "metrics.jsonl")}
    opened = RunFolder(folder)
    rows = [row for row in trackio_rows(opened, "watched") if "reward_mean" in row]
    assert {int(row["step"]): row["reward_mean"] for row in rows} == pytest.approx(lines, abs=1e-6)
    assert dict(tensorboard_points(opened, "reward_mean")) == pytest.approx(lines, abs=1e-6)
    logged = [line for line in (folder / "logs" / "trainer.log").read_text().splitlines() if line.startswith("{")]
    assert len(logged) > len(lines) and {json.loads(line)["role"] for line in logged} == {"trainer"}

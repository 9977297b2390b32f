"""Logs of a whole run: JSON throughout, the launcher's own among them; and a logger that dies stops nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from shoal.step_metrics import read_metrics
from tests.launch.test_supervisor import RUN_FILE

ROOT = Path(__file__).parents[2]

DIES = """
import os
os._exit(3)  # at once, without a word: no `except` of ours sees it
"""


def test_a_logger_that_dies_at_once_stops_no_training_and_every_log_is_json(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    (tmp_path / "broken" / "tensorboard").mkdir(parents=True)
    (tmp_path / "broken" / "tensorboard" / "__init__.py").write_text(DIES)
    values = ("steps=3", "eval.episodes=0", "workers.cheating=0", 'logging.format="json"')
    values += ('logging.to=["jsonl", "tensorboard"]',)
    run = subprocess.run(
        [
            sys.executable, "-m", "shoal.cli.main", "run", "small.toml",
            *(word for value in values for word in ("--set", value)),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=180,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'broken'}:{ROOT}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    folder = tmp_path / "runs" / "small"
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [*range(3)]
    told = [line for line in run.stdout.splitlines() if "logger" in line]
    assert len(told) == 1 and re.match(r"the run goes on without logger: logger died \d times", told[0]), run.stdout

    logs = {path.stem: path.read_text().splitlines() for path in (folder / "logs").glob("*.log")}
    assert {"launcher", "coordinator", "trainer", "worker-0", "validator-0"} <= logs.keys()
    lines = {name: [json.loads(line) for line in text] for name, text in logs.items()}
    assert all(
        {"time", "level", "role", "message", "fields"} <= line.keys() for each in lines.values() for line in each
    )
    own = lines["launcher"]
    assert {"phase": "running", "step": 0} in [line["fields"] for line in own]
    assert any(line["fields"].get("process") == "logger" and line["level"] == "warning" for line in own)
    assert told[0] in [line["message"] for line in own] and own[-1]["role"] == "launcher"

"""A small run on this machine as its user sees it: started, refused a second time, stopped by Ctrl-C, killed, resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shoal.errors import StateError
from shoal.launch.lock import locked

RUN_FILE = """
name = "small"
steps = 60  # enough to be still running when the second `shoal run` gives up
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
cheating = 1
[eval]
episodes = 32
[storage]
checkpoint_every = 30
"""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "small.toml").write_text(RUN_FILE)
    command = [sys.executable, "-m", "shoal.cli", "run", "small.toml"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(what: str, holds: Callable[[], bool], run: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            raise AssertionError(f"waited for {what}; the run said: {run.communicate()[0]}")
        time.sleep(0.05)


def steps_done(folder: Path) -> int:
    metrics = folder / "runs" / "small" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def processes_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cwd() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_run_is_stopped_killed_resumed_and_ends_with_a_summary(tmp_path: Path) -> None:
    """One story, because each part needs a run under way."""
    run = start(tmp_path)
    lock = tmp_path / "runs" / "small" / ".lock"
    wait_for("the lock", lambda: lock.exists() and lock.read_text() == str(run.pid), run)

    second = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "run", "small.toml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert second.returncode == 2 and f"in use by another shoal (process {run.pid})" in second.stderr

    wait_for("a first step", lambda: steps_done(tmp_path) >= 1, run)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "The same command resumes the run" in said
    assert processes_in(tmp_path) == []

    run = start(tmp_path)
    wait_for("the roles", lambda: len(processes_in(tmp_path)) >= 6, run)
    run.kill()
    run.communicate()
    deadline = time.monotonic() + 10
    while processes_in(tmp_path):
        assert time.monotonic() < deadline, "the roles outlive their launcher"
        time.sleep(0.05)

    run = start(tmp_path)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    check_end(tmp_path / "runs" / "small", said)


def check_end(folder: Path, said: str) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {
        "heldout", "steps", "tokens", "accepted", "refused", "credits", "influence", "staleness", "wall_s", "cpu_s",
        "weights_hash",
    }  # fmt: skip
    for when in ("before", "after"):
        found = summary["heldout"][when]
        assert found["episodes"] == 32 and found["low95"] <= found["mean"] <= found["high95"]
    assert summary["steps"] == 60 and summary["accepted"] > 0 and len(summary["weights_hash"]) == 64
    honest, cheater = summary["credits"]["worker-0"], summary["credits"]["cheater-0"]
    assert honest["role"] == "honest" and honest["credits"] == summary["tokens"] > 0
    assert cheater == {"credits": 0, "role": "cheating"}
    assert summary["influence"] == {"worker-0": 1.0, "cheater-0": 0.0}
    assert {"coordinator", "trainer", "worker", "validator", "evaluate", "launcher"} <= summary["cpu_s"].keys()
    assert summary["wall_s"] > 1 and sum(summary["staleness"].values()) > 0
    assert "held-out after:" in said and "checkpoints/final" in said and "shoal ledger verify" in said
    verified = subprocess.run([sys.executable, "-m", "shoal.cli", "ledger", "verify", str(folder)], capture_output=True)
    assert verified.returncode == 0, verified.stdout


def test_folder_is_held_by_one_launcher_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.lock.LOCK_WAIT_S", 0.2)
    with locked(tmp_path), pytest.raises(StateError, match=f"process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_role_that_cannot_continue_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE + "[host]\nport = 1\nbind = '203.0.113.1'\n")
    command = [sys.executable, "-m", "shoal.cli", "run", "small.toml", "--set", "seed=-1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "cannot listen on 203.0.113.1 port 1" in result.stderr
    assert processes_in(tmp_path) == []

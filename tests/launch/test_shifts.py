"""A whole run whose processes take shifts on one device has the bytes of one whose processes share it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.test_supervisor import RUN_FILE

CHANGES = (
    "steps=6", "rollouts.max_staleness=0", "train.lr=0.001", "workers.count=2", "workers.cheating=0",
    "storage.checkpoint_every=3",
)  # fmt: skip


def start(folder: Path, shifts: str) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "small.toml").write_text(RUN_FILE)
    changes = [word for change in (*CHANGES, f"host.shifts={shifts}") for word in ("--set", change)]
    command = [sys.executable, "-m", "shoal.cli.main", "run", "small.toml", *changes]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_of(folder: Path, run: subprocess.Popen[str]) -> tuple[dict[str, object], str]:
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    return json.loads((folder / "runs" / "small" / "summary.json").read_text()), said


def holder_of(queue: Path) -> str:
    """The process with the lowest number."""
    names = sorted(path.name for path in queue.glob("0*")) if queue.exists() else []
    return names[0].partition(".")[2] if names else ""


def kill(role: str, folder: Path) -> bool:
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cwd() and re.search(f"role {role.split('-')[0]} ", " ".join(process.cmdline())):
                os.kill(process.pid, signal.SIGKILL)
                return True
        except (psutil.Error, ProcessLookupError):
            continue
    return False


@pytest.mark.slow
def test_a_run_in_shifts_has_the_bytes_of_one_without_also_if_processes_are_killed_on_their_shift(tmp_path) -> None:
    plain, _ = end_of(tmp_path / "off", start(tmp_path / "off", "off"))
    folder = tmp_path / "on"
    run, killed = start(folder, "on"), set[str]()
    queue, deadline = folder / "runs" / "small" / "shifts" / "cpu", time.monotonic() + 200
    while run.poll() is None and len(killed) < 3 and time.monotonic() < deadline:
        holder = holder_of(queue).partition("-")[0]
        if holder in ("trainer", "worker", "validator") and holder not in killed and kill(holder, folder):
            killed.add(holder)
            time.sleep(0.5)
        time.sleep(0.005)
    shared, said = end_of(folder, run)
    assert killed == {"trainer", "worker", "validator"}
    assert "take shifts on cpu" in said
    for key in ("weights_hash", "steps", "accepted", "refused", "heldout"):
        assert shared[key] == plain[key], key
    waits = "".join(path.read_text() for path in (folder / "runs" / "small" / "logs").glob("*.log"))
    assert "waits for the device behind=" in waits and "has the device after=" in waits

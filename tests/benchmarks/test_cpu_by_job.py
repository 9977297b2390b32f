"""Counting the CPU time of a run's real jobs leaves everything else in the run as it is."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu_by_job.py"


def test_under_the_stopwatch_environments_start_as_they_do_without(tmp_path):
    env = os.environ | {"SHOAL_CPU_BY_JOB": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), "env", "check", "benchmarks/envs/vowels.py"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=PROGRAM.parents[1])
    assert told.returncode == 0, told.stdout + told.stderr
    said = subprocess.run([tmp_path / "python", "-c", "print(6 * 7)"], capture_output=True, text=True, timeout=60)
    assert said.stdout == "42\n"
    role = [str(tmp_path / "python"), "-m", "shoal.cli.main", "role", "worker", "--help"]
    assert subprocess.run(role, env=env, capture_output=True, timeout=120, cwd=PROGRAM.parents[1]).returncode == 0
    assert len(list(tmp_path.glob("*.json"))) == 1, "a role of the launcher is counted"

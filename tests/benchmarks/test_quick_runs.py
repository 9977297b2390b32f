"""Each benchmark runs in its quick form and ends with its line of JSON."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import last_line
from benchmarks.measure import ROOT, cpu_ms, numbers

QUICK = {
    "beyond": "--quick",
    "broadcast": "--quick --only plain",
    "completions": "--quick",
    "connections": "--idle 50 --seconds 1",
    "crowd": "--quick",
    "curriculum": "--quick",
    "decode": "--batches 1 --repeats 1",
    "detection": "--quick",
    "economics": "--quick",
    "kill_storm": "--kills 2",
    "losses/cost": "--steps 1 --rounds 1",
    "monitors": "--only faults --fault host_clock",
    "page": "--steps 100 --workers 20 --groups 120 --viewers 5 --rounds 1 --seconds 3",
    "patches": "--quick",
    "planning": "--repeats 1 --steps 2 --case uplink",
    "poisoning": "--quick",
    "sandbox": "--quick",
    "toploc": "--quick",
    "verify_cost": "--repeats 1 --vocabularies 64",
}
NOT_QUICK = {"demo", "first_hour", "notebook", "whole_system", "losses/agree"}
"""Whole runs, or peers that have to be installed."""
PARTS = {"__init__", "cpu_by_job", "figures", "measure", "planning_run", "stones", "synthetic_run"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_ends_with_its_line(name: str, tmp_path: Path) -> None:
    command = [sys.executable, f"benchmarks/{name}.py", *QUICK[name].split()]
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True, check=False)
    assert done.returncode in (0, 1), errors.read_text()[-2000:]  # 1: a bar is missed, which a quick run may
    assert last_line(done.stdout)["benchmark"] == name.replace("/", "_")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NOT_QUICK))
def test_a_benchmark_without_a_quick_form_starts(name: str) -> None:
    command = [sys.executable, f"benchmarks/{name}.py", "--help"]
    assert "usage:" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_script_is_run_or_is_a_part() -> None:
    folders = (ROOT / "benchmarks", ROOT / "benchmarks/losses")
    scripts = {file.relative_to(folders[0]).with_suffix("").as_posix() for one in folders for file in one.glob("*.py")}
    assert scripts == QUICK.keys() | NOT_QUICK | PARTS | {"losses/__init__"}


def test_numbers_are_a_range_or_a_list() -> None:
    assert numbers("1-4") == [1, 2, 3, 4] and numbers("3,5") == [3, 5]


def test_ways_take_turns_and_their_first_turn_is_not_counted() -> None:
    seen: list[str] = []
    taken = cpu_ms(2, {"one": lambda: seen.append("one"), "two": lambda: seen.append("two")})
    assert seen == ["one", "two"] * 3 and taken.keys() == {"one", "two"}

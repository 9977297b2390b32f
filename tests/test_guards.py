"""Each guard removed in turn breaks a test: no defence is in the source that nothing would miss (tests/guards.py)."""

import ast
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.guards import GUARDS, MARKER, ROOT, Guard, copy_without, marked, source_without

SLIPS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError", "fixture '")
"""Signs that a removal broke the program, not the guard."""
PLACES = dict(marked(ROOT))


def test_each_marker_in_the_source_is_in_the_table_once_and_the_reverse() -> None:
    in_source, in_table = Counter(name for name, _ in marked(ROOT)), Counter(guard.name for guard in GUARDS)
    assert in_source == in_table, f"{in_source - in_table} in the source only, {in_table - in_source} in the table only"
    assert set(in_table.values()) == {1}, in_table.most_common(1)


def test_every_comment_about_a_guard_is_a_marker() -> None:
    lines = [(file, line) for file in (ROOT / "shoal").rglob("*.py") for line in file.read_text().splitlines()]
    unread = [f"{file}: {line}" for file, line in lines if "# guard" in line and not MARKER.search(line)]
    assert unread == [], "a marker is `# guard: one-name, another`, with nothing behind it"


def test_every_guard_can_be_taken_out_and_its_test_exists() -> None:
    for guard in sorted(GUARDS, key=lambda guard: PLACES[guard.name]):
        file, line = PLACES[guard.name]
        source = (ROOT / file).read_text()
        without = source_without(guard, source, line)
        ast.parse(without)
        assert without != source, guard.name
        path, _, test = guard.test.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), f"{guard.name}: {path} has no {test}"


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_without_its_guard_a_test_fails(guard: Guard, tmp_path) -> None:
    copy_without(guard, PLACES[guard.name], tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=short", guard.test]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    said = run.stdout + run.stderr
    assert run.returncode != 0, f"{guard.test} passes without the guard {guard.name}: write the test that it lacks"
    assert run.returncode == 1, f"{guard.test} did not run: {said[-2000:]}"
    assert not any(slip in said for slip in SLIPS), said[-2000:]

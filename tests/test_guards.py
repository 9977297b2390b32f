"""Each guard removed in turn breaks a test: no defence stands in the source that nothing would miss (tests/guards.py)."""

import os
import subprocess
import sys

import pytest

from tests.guards import GUARDS, ROOT, Guard, copy_without, source_of

SLIPS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "fixture '")
"""Signs that a removal broke the program, not the guard."""


def test_every_guard_stands_in_the_source_once_and_its_test_exists() -> None:
    for guard in GUARDS:
        source_of(guard, ROOT)
        assert guard.text != guard.without, guard.name
        path, _, test = guard.test.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), f"{guard.name!r}: {path} has no {test}"
    assert len({(guard.name, guard.file) for guard in GUARDS}) == len(GUARDS)


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.file.split('/')[-1]}: {guard.name}")
def test_without_its_guard_a_test_fails(guard: Guard, tmp_path) -> None:
    copy_without(guard, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=short", guard.test]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    said = run.stdout + run.stderr
    assert run.returncode != 0, f"{guard.test} passes without the guard {guard.name!r}: write the test that it lacks"
    assert run.returncode == 1, f"{guard.test} did not run: {said[-2000:]}"
    assert not any(slip in said for slip in SLIPS), said[-2000:]

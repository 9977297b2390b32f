"""A real run by processes over HTTP, in which every role is SIGKILLed once, ends with the bytes of `one_file`."""

import random
import sys
from pathlib import Path

import pytest

from benchmarks import kill_storm
from shoal.config import load_run
from shoal.roles.auditor import audit_folder
from shoal.weights.manifest import weights_root

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import one_file


@pytest.mark.parametrize("kind", ["episodes", "completions"])
def test_every_role_killed_once_changes_nothing_and_loses_nothing(tmp_path, kind):
    out, roles = tmp_path / "run", [*kill_storm.ROLES[::-1], *(["stage"] if kind == "completions" else [])]
    launcher = kill_storm.start(tmp_path, out, kind, steps=len(roles), staleness=0)
    try:
        rng = random.Random(0)
        for version, role in enumerate(roles):
            kill_storm.wait_for(
                lambda v=version: kill_storm.version(out) >= min(v, len(roles) - 1), f"version {version}"
            )
            assert kill_storm.kill(launcher.pid, role, rng), f"no {role} to kill"
        assert launcher.wait(timeout=200) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
    config = load_run(tmp_path / "storm.toml")
    assert weights_root(out / "checkpoints/final") == one_file.train(config, tmp_path / "one", tmp_path)
    assert audit_folder(out).findings == []

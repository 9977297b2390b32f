"""A real run by processes over HTTP, in which every role is SIGKILLed once, ends with the bytes of `one_file`."""

import random
import sys
from pathlib import Path

from benchmarks import kill_storm
from shoal.config import load_run
from shoal.roles.auditor import audit_folder
from shoal.weights.manifest import weights_root

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import one_file


def test_every_role_killed_once_changes_nothing_and_loses_nothing(tmp_path):
    out = tmp_path / "run"
    launcher = kill_storm.start(tmp_path, out, steps=4, staleness=0)
    try:
        rng = random.Random(0)
        for version, role in enumerate(kill_storm.ROLES[::-1]):
            kill_storm.wait_for(lambda v=version: kill_storm.version(out) >= min(v, 3), f"version {version}")
            assert kill_storm.kill(launcher.pid, role, rng), f"no {role} to kill"
        assert launcher.wait(timeout=200) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
    config = load_run(tmp_path / "storm.toml")
    assert weights_root(out / "checkpoints/final") == one_file.train(config, tmp_path / "one", tmp_path)
    assert audit_folder(out).findings == []

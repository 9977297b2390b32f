"""Real runs by processes over HTTP, in which roles are SIGKILLed, end with the bytes of `one_file`, or of their own log."""

import asyncio
import random
import shutil
import sys
import time
from pathlib import Path

import pytest

from benchmarks import kill_storm
from benchmarks.measure import wait_for
from shoal.config import load_run
from shoal.roles.auditor.verify_log import audit_folder
from shoal.roles.trainer.state import StepJournal
from shoal.train.checkpoint import kept_versions
from shoal.weights.manifest import weights_root
from tests.roles.testbed import RunTestbed

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import one_file


@pytest.mark.parametrize("kind", ["episodes", pytest.param("completions", marks=pytest.mark.slow)])
def test_every_role_killed_once_changes_nothing_and_loses_nothing(tmp_path, kind):
    """The trainer saves every third state, and is killed twice more: it repeats the steps since its last one."""
    others = ["stage"] if kind == "completions" else []
    out, roles = tmp_path / "run", [*kill_storm.ROLES[::-1], "trainer", *others, "trainer"]
    launcher = kill_storm.start(tmp_path, out, kind, more="state_every = 3", steps=len(roles), staleness=0)
    try:
        rng = random.Random(0)
        for version, role in enumerate(roles):
            wait_for(lambda v=version: kill_storm.version(out) >= min(v, len(roles) - 1), f"version {version}")
            assert kill_storm.kill(launcher.pid, role, rng), f"no {role} to kill"
        assert launcher.wait(timeout=200) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
    _ends_with_the_bytes_of_one_file(tmp_path, out)
    assert b"repeated the step that made version=" in (out / "logs" / "trainer.log").read_bytes()


VINE = """
[train.algorithm]
name = "composition"
[train.algorithm.credit]
name = "vine"
continuations = 2
every = 1
most = 2
"""


@pytest.mark.slow
def test_kills_lose_no_continuations_and_change_nothing(tmp_path):
    out, rng, kills = tmp_path / "run", random.Random(2), [*kill_storm.ROLES, "worker", "worker"]
    launcher = kill_storm.start(tmp_path, out, more=VINE, steps=len(kills), staleness=0)
    try:
        for step, role in enumerate(kills):
            wait_for(lambda v=step: kill_storm.version(out) >= v, f"version {step}")
            time.sleep(rng.uniform(0.0, 0.3))
            kill_storm.kill(launcher.pid, role, rng)
        assert launcher.wait(timeout=200) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
    _ends_with_the_bytes_of_one_file(tmp_path, out)


CRITIC = """
[train.algorithm]
name = "ppo"
advantage = "gae"
[train.critic]
lr = 1e-3
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", CRITIC], ids=["often", "critic"])
def test_a_trainer_killed_at_any_step_repeats_those_since_its_last_state(tmp_path, more):
    """It saves every third state: some kills come while a state is being written, or while steps are repeated."""
    out, rng, kills = tmp_path / "run", random.Random(1), 6
    launcher = kill_storm.start(tmp_path, out, more="state_every = 3" + more, steps=kills + 2, staleness=0)
    try:
        for version in range(1, kills + 1):
            wait_for(lambda v=version: kill_storm.version(out) >= v, f"version {version}")
            time.sleep(rng.uniform(0.0, 0.3))
            kill_storm.kill(launcher.pid, "trainer", rng)
        assert launcher.wait(timeout=200) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
    _ends_with_the_bytes_of_one_file(tmp_path, out)
    assert b"repeated the step that made version=" in (out / "logs" / "trainer.log").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_an_asynchronous_run_that_is_killed_at_random_times_ends_as_its_log_says(tmp_path, seed):
    """What its batches hold depends on who was killed when, so no other run has the same. But the log decides them: a
    trainer that learns all steps again from it comes to the same bytes, and each group is used and paid once."""
    out, rng, kills = tmp_path / "run", random.Random(seed), [*kill_storm.ROLES, *kill_storm.ROLES]
    rng.shuffle(kills)
    launcher = kill_storm.start(tmp_path, out, more="state_every = 99", steps=2 * len(kills), staleness=3)
    try:
        wait_for(lambda: kill_storm.version(out) >= 1, "the first step")
        for role in kills:
            time.sleep(rng.uniform(0.0, 1.0))
            kill_storm.kill(launcher.pid, role, rng)
        assert launcher.wait(timeout=200) == 0, (tmp_path / "launcher.log").read_text()[-3000:]
    finally:
        launcher.kill()
    audit = audit_folder(out)
    assert audit.findings == [] and len(audit.state.main.batches) == 2 * len(kills)
    weights = weights_root(out / "checkpoints/final")
    again = learned_again(out, load_run(tmp_path / "storm.toml"))
    assert again == weights and audit_folder(out).findings == []


def learned_again(out, config):
    """Weights of a trainer that has lost all states but its first, and learns every step again from the log."""
    for version in kept_versions(out / "trainer"):
        if version:
            shutil.rmtree(out / "trainer" / f"v{version:06d}")
    for step in list(StepJournal(out / "trainer" / "journal").after(0)):
        (out / "trainer" / "journal" / f"v{step.version:06d}.step").unlink()
    shutil.rmtree(out / "checkpoints")
    testbed = RunTestbed(out, config)
    asyncio.run(testbed.live(testbed.trainer()))
    return testbed.weights()


def _ends_with_the_bytes_of_one_file(tmp_path, out):
    config = load_run(tmp_path / "storm.toml")
    assert weights_root(out / "checkpoints/final") == one_file.train(config, tmp_path / "one", tmp_path)
    assert audit_folder(out).findings == []

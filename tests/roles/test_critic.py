"""Runs with a critic: it is the trainer's own and part of its state, and the same step gives the same bytes."""

import asyncio
import shutil

from safetensors import safe_open

from shoal.ledger.batches import GroupAccepted
from shoal.step_metrics import read_metrics
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

CRITIC = {
    "algorithm": {"name": "ppo", "advantage": "gae"},
    "critic": {"lr": 1e-3, "warmup_steps": 1},
    "updates_per_batch": 2,
}


def test_a_run_with_a_critic_has_the_bytes_of_one_file_and_repeats_a_step_without_its_state(tmp_path):
    config = tiny_run(train=CRITIC, storage={"state_every": 2})
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    weights = testbed.weights()
    assert weights == weights_of_one_file(config, tmp_path / "one")
    lines = read_metrics(testbed.folder.metrics)
    assert ["loss" in line for line in lines] == [False, True, True] and all(line["value_loss"] > 0 for line in lines)
    accepted = [entry.body for entry in testbed.audit().entries if isinstance(entry.body, GroupAccepted)]
    assert accepted and all(group.signal for group in accepted)
    assert not testbed.audit().findings
    published = {path.name for path in (testbed.folder.checkpoints / "final").glob("*.safetensors")}
    with safe_open(testbed.folder.checkpoints / "final" / published.pop(), "np") as file:
        assert not any("score" in name or "critic" in name for name in file.keys())  # noqa: SIM118
    state = (testbed.folder.trainer / "v000003/state.safetensors").read_bytes()
    shutil.rmtree(testbed.folder.trainer / "v000003")
    shutil.rmtree(testbed.folder.checkpoints)
    asyncio.run(testbed.live(testbed.trainer()))
    assert testbed.weights() == weights
    assert (testbed.folder.trainer / "v000003/state.safetensors").read_bytes() == state
    with safe_open(testbed.folder.trainer / "v000003/state.safetensors", "np") as file:
        assert "critic/adam.m/score.weight" in file.keys()  # noqa: SIM118

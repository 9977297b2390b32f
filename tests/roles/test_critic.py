"""Runs with a critic: it is the trainer's own and part of its state, and the same step gives the same bytes."""

import asyncio
import shutil

import pytest
from safetensors import safe_open

from shoal.ledger.batches import GroupAccepted
from shoal.metrics import read_metrics
from tests.roles.in_memory_run import Town, tiny_run, weights_of_one_file

CRITIC = {
    "algorithm": {"name": "ppo", "advantage": "gae"},
    "critic": {"lr": 1e-3, "warmup_steps": 1},
    "updates_per_batch": 2,
}


def test_a_run_with_a_critic_has_the_bytes_of_one_file_and_learns_from_every_group(tmp_path):
    config = tiny_run(train=CRITIC)
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")
    lines = read_metrics(town.folder.metrics)
    assert ["loss" in line for line in lines] == [False, True, True] and all(line["value_loss"] > 0 for line in lines)
    accepted = [entry.body for entry in town.audit().entries if isinstance(entry.body, GroupAccepted)]
    assert accepted and all(group.signal for group in accepted)
    assert not town.audit().findings
    published = {path.name for path in (town.folder.checkpoints / "final").glob("*.safetensors")}
    with safe_open(town.folder.checkpoints / "final" / published.pop(), "np") as file:
        assert not any("score" in name or "critic" in name for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("every", [1, 2])
def test_a_trainer_that_lost_its_last_state_repeats_the_step_of_policy_and_critic(tmp_path, every):
    storage = {"state_every": every}
    town = Town(tmp_path / "run", tiny_run(train=CRITIC, storage=storage))
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    weights, state = town.weights(), (town.folder.trainer / "v000003/state.safetensors").read_bytes()
    shutil.rmtree(town.folder.trainer / "v000003")
    shutil.rmtree(town.folder.checkpoints)
    asyncio.run(town.live(town.trainer()))
    assert town.weights() == weights
    assert (town.folder.trainer / "v000003/state.safetensors").read_bytes() == state
    with safe_open(town.folder.trainer / "v000003/state.safetensors", "np") as file:
        assert "critic/adam.m/score.weight" in file.keys()  # noqa: SIM118

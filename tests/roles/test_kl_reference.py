"""Runs with a KL penalty: the reference is the trainer's own, the same at every start, and repeats the same bytes."""

import asyncio
import shutil

import pytest

from shoal.errors import StateError
from shoal.models.random_model import make_tiny
from shoal.roles.trainer.models import ROOT, demand_same
from shoal.step_metrics import read_metrics
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

PENALISED = {"algorithm": {"name": "dr_grpo", "kl": {"beta": 0.5, "estimator": "k2"}}}


def test_a_run_with_a_penalty_has_the_bytes_of_one_file_and_repeats_a_step_without_its_state(tmp_path):
    config = tiny_run(train=PENALISED)
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    weights = weights_of_one_file(config, tmp_path / "one")
    assert testbed.weights() == weights != weights_of_one_file(tiny_run(), tmp_path / "plain")
    assert all(line["reference_s"] > 0 and line["kl_nats"] >= 0 for line in read_metrics(testbed.folder.metrics))
    shutil.rmtree(testbed.folder.trainer / "v000003")
    shutil.rmtree(testbed.folder.checkpoints)
    asyncio.run(testbed.live(testbed.trainer()))
    assert (testbed.folder.trainer / "v000003").is_dir() and testbed.weights() == weights


def test_a_run_without_a_penalty_keeps_no_reference(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    assert testbed.trainer().refer is None and not (testbed.folder.trainer / ROOT).exists()


def test_another_first_policy_than_the_run_began_with_is_refused(tmp_path):
    for seed in (0, 1):
        make_tiny(tiny_run().policy.tiny, tmp_path / f"{seed}", seed, "float32")
    demand_same(tmp_path / "0", tmp_path / ROOT, "the policy", "its KL penalty needs")
    demand_same(tmp_path / "0", tmp_path / ROOT, "the policy", "its KL penalty needs")
    with pytest.raises(StateError, match="is not the one that this run began with"):
        demand_same(tmp_path / "1", tmp_path / ROOT, "the policy", "its KL penalty needs")

"""Runs that publish int8: what is sent, what is sampled and replayed, what is kept, and who is refused."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch

from shoal.config import check_run
from shoal.engine.decoder import Decoder
from shoal.engine.native import LocalEngine
from shoal.errors import ConfigError
from shoal.models.checkpoint import load_policy, tensors_of
from shoal.models.int8 import dequantised, quantised
from shoal.weights.manifest import is_whole
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

ROOT = Path(__file__).parents[2]

PUBLISHED = {"policy": {"dtype": "int8"}}


def lived(testbed: RunTestbed) -> RunTestbed:
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    assert testbed.audit().findings == []
    return testbed


def last_root(testbed: RunTestbed) -> str:
    return testbed.coordinator.kept.manifests[testbed.config.steps].root


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return lived(RunTestbed(tmp_path_factory.mktemp("int8") / "run", tiny_run(**PUBLISHED)))


def test_a_run_that_publishes_int8_publishes_the_bytes_of_one_file(tmp_path, finished):
    testbed = finished
    assert last_root(testbed) == weights_of_one_file(tiny_run(**PUBLISHED), tmp_path / "one")
    manifests = testbed.coordinator.kept.manifests
    assert {manifest.dtype for manifest in manifests.values()} == {"int8"}
    assert testbed.coordinator.state.rules.dtype == "int8"


def test_what_is_kept_is_what_was_learned_and_what_was_published_is_its_rounding(finished):
    testbed = finished
    kept, published = testbed.folder.checkpoints / "final", testbed.folder.trainer / "publishing"
    assert {dtype for dtype, _, _ in tensors_of(kept).values()} == {"F32"}
    assert not (testbed.folder.trainer / "keeping").exists()
    learned, sampled = load_policy(kept), load_policy(published)
    for name, weight in learned.named_parameters():
        rounded = dequantised(*quantised(weight.detach())) if weight.dim() == 2 else weight
        assert sampled.get_parameter(name).equal(rounded), name


def test_a_trainer_that_was_killed_publishes_the_same_codes_again(tmp_path, finished):
    before, kept = last_root(finished), finished.weights()
    shutil.copytree(finished.folder.root, tmp_path / "run")
    testbed = RunTestbed(tmp_path / "run", finished.config)
    for folder in (testbed.folder.trainer / "v000003", testbed.folder.checkpoints):
        shutil.rmtree(folder)
    asyncio.run(testbed.live(testbed.trainer()))
    assert last_root(testbed) == before and testbed.weights() == kept


def test_slow_steps_are_published_as_patches_between_codes(tmp_path):
    slow = tiny_run(**PUBLISHED, train={"lr": 1e-6}, storage={"anchor_every": 3})
    testbed = lived(RunTestbed(tmp_path / "run", slow))
    manifests = testbed.coordinator.kept.manifests
    assert [is_whole(manifests[version]) for version in range(4)] == [True, False, False, True]


class FullPrecision(LocalEngine):
    """Samples the policy that the trainer keeps to itself, which only its host could give away."""

    whole: Path

    def load(self, directory, version):
        super().load(directory, version)
        model = load_policy(self.whole)
        with torch.no_grad():
            self._loaded = Decoder(model, self.facts.device)


def test_a_worker_that_samples_the_unrounded_policy_is_refused(tmp_path):
    """Its claims are true of another policy than the one that was published."""
    start = {"path": str(ROOT / "recipes" / "arithmetic-start"), "dtype": "int8"}
    sums = {"envs": [{"name": "arithmetic", "args": {"digits": 2, "operations": "+"}}], "steps": 1}
    testbed = RunTestbed(tmp_path / "run", tiny_run(policy=start, sampling={"max_tokens": 24}, **sums))
    cheat, honest = testbed.worker("cheat"), testbed.worker("honest")
    trainer = testbed.trainer()  # makes the first policy

    def make_engine(dtype):
        engine = FullPrecision(threads=1, dtype=dtype)
        engine.whole = testbed.folder.policy
        return engine

    cheat.node.make_engine = make_engine
    asyncio.run(testbed.live(trainer, testbed.validator(), cheat, honest))
    members = testbed.coordinator.state.members
    assert members[honest.key].refused == 0 and members[honest.key].accepted > 0
    assert members[cheat.key].accepted == 0 and members[cheat.key].refused > 0


@pytest.mark.parametrize("sampled", ["float32", "bfloat16"])
def test_what_is_published_in_int8_is_sampled_in_int8(sampled):
    with pytest.raises(ConfigError, match="leave sampling"):
        check_run(tiny_run(**PUBLISHED, sampling={"dtype": sampled}))

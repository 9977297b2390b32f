"""In a run whose bounds are loose, claimed log-probs do not reach the weights, and a repeated step has the same bits."""

import asyncio
import shutil

import pytest

from shoal.engine.native import LocalEngine
from shoal.step_metrics import read_metrics
from tests.nightly import first_of
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file


class Muting(LocalEngine):
    """Claims that every token was 0.1 nats less likely than it was, which the bounds of bfloat16 allow."""

    def extend(self, requests, temperature):
        return [
            turn._replace(logprobs=[logprob - 0.1 for logprob in turn.logprobs])
            for turn in super().extend(requests, temperature)
        ]


@pytest.mark.parametrize(
    ("dtype", "trained_in"), first_of(("bfloat16", ""), ("float32", ""), ("bfloat16", "bfloat16"), num=2)
)
def test_false_claims_within_the_bounds_change_no_byte_of_a_coarse_run(tmp_path, dtype, trained_in):
    train = {"dtype": trained_in, "moments": "8bit" if trained_in else "float32"}
    config = tiny_run(steps=2, policy={"dtype": dtype}, verify={"audit_rate": 1.0}, train=train)
    testbed = RunTestbed(tmp_path / "run", config)
    liar, honest = testbed.worker("liar"), testbed.worker("honest")
    if dtype == "bfloat16":
        liar.node.make_engine = lambda dtype: Muting(threads=1, dtype=dtype)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), liar, honest))
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")
    assert testbed.coordinator.state.members[liar.key].accepted > 0 and testbed.audit().findings == []
    computed = ["denominators_s" in line for line in read_metrics(testbed.folder.metrics)]
    assert computed == [dtype == "bfloat16"] * 2


def test_a_step_that_is_repeated_after_a_kill_has_the_same_denominators(tmp_path):
    """Mostly with groups of two versions. The version is published already, so other bytes would be refused."""
    config = tiny_run(steps=2, policy={"dtype": "bfloat16"}, rollouts={"max_staleness": 1})
    testbed = RunTestbed(tmp_path / "run", config)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0")))
    before = testbed.weights()
    shutil.rmtree(testbed.folder.trainer / "v000002")
    shutil.rmtree(testbed.folder.trainer / "published")
    shutil.rmtree(testbed.folder.checkpoints)
    asyncio.run(testbed.live(testbed.trainer()))
    assert (testbed.folder.trainer / "v000002").is_dir() and testbed.weights() == before

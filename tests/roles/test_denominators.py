"""In a run whose bounds are loose, claimed log-probs do not reach the weights, and a repeated step has the same bits."""

import asyncio
import shutil

import pytest

from shoal.engine.native import LocalEngine
from shoal.metrics import read_metrics
from tests.nightly import first_of
from tests.roles.in_memory_run import Town, tiny_run, weights_of_one_file


class Muting(LocalEngine):
    """Claims that every token was 0.1 nats less likely than it was, which the bounds of bfloat16 allow."""

    def extend(self, requests, temperature):
        return [
            turn._replace(logprobs=[logprob - 0.1 for logprob in turn.logprobs])
            for turn in super().extend(requests, temperature)
        ]


COARSE = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "trained_in"), first_of(("bfloat16", ""), ("float32", ""), ("bfloat16", "bfloat16"), num=2)
)
def test_false_claims_within_the_bounds_change_no_byte_of_a_coarse_run(tmp_path, dtype, trained_in):
    train = {"dtype": trained_in, "moments": "8bit" if trained_in else "float32"}
    config = tiny_run(policy={"dtype": dtype}, verify={"audit_rate": 1.0}, train=train)
    town = Town(tmp_path / "run", config)
    liar, honest = town.worker("liar"), town.worker("honest")
    if dtype == "bfloat16":
        liar.node.make_engine = lambda dtype: Muting(threads=1, dtype=dtype)
    asyncio.run(town.live(town.trainer(), town.validator(), liar, honest))
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")
    assert town.desk.state.members[liar.key].accepted > 0 and town.audit().findings == []
    computed = ["denominators_s" in line for line in read_metrics(town.folder.metrics)]
    assert computed == [dtype == "bfloat16"] * 3


def test_a_step_that_is_repeated_after_a_kill_has_the_same_denominators(tmp_path):
    """Mostly with groups of two versions. The version is published already, so other bytes would be refused."""
    config = tiny_run(policy=COARSE, rollouts={"max_staleness": 1})
    town = Town(tmp_path / "run", config)
    asyncio.run(town.live(town.trainer(), town.validator(), town.worker("worker-0")))
    before = town.weights()
    shutil.rmtree(town.folder.trainer / "v000003")
    shutil.rmtree(town.folder.trainer / "published")
    shutil.rmtree(town.folder.checkpoints)
    asyncio.run(town.live(town.trainer()))
    assert (town.folder.trainer / "v000003").is_dir() and town.weights() == before

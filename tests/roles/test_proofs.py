"""Runs that ask workers for proofs of their activations: the real roles over an in-memory network."""

import asyncio

import pytest

from shoal.config import ACTIVATION_ERROR, check_run
from shoal.engine.dishonest import Cheat
from shoal.errors import ConfigError
from shoal.roles.coordinator.main import rules_of
from tests.roles.testbed import RunTestbed, tiny_run


class Negating(Cheat):
    """Samples honestly, but proves activations with the wrong sign, which are as wrong as invented ones."""

    def score(self, requests, temperature, hidden=False):
        scores = self.engine.score(requests, temperature, hidden)
        return [score._replace(hidden_PD=-score.hidden_PD) if hidden else score for score in scores]


def test_a_worker_that_forges_its_proofs_earns_nothing_beside_an_honest_one(tmp_path):
    testbed = RunTestbed(tmp_path / "run", tiny_run(verify={"proofs": "toploc"}))
    forger, honest = testbed.worker("forger"), testbed.worker("honest")
    make_engine = forger.node.make_engine
    forger.node.make_engine = lambda dtype: Negating(make_engine(dtype))
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), forger, honest))
    nodes = testbed.coordinator.state.members
    assert nodes[forger.key].credits == 0 and set(nodes[forger.key].reasons) == {"activations"}
    assert nodes[honest.key].credits > 0 and nodes[honest.key].refused == 0


def test_a_run_file_says_how_far_a_proof_may_be_off_or_takes_what_its_dtype_needs():
    for dtype in ("float32", "bfloat16"):
        asked = tiny_run(policy={"dtype": dtype}, verify={"proofs": "toploc"})
        assert rules_of(asked).activation_error == ACTIVATION_ERROR[dtype]
    own = tiny_run(verify={"proofs": "toploc", "activation_error": 0.002})
    assert (rules_of(own).proofs, rules_of(own).activation_error) == ("toploc", 0.002)
    with pytest.raises(ConfigError, match=r"verify\.activation_error = .*: must be at least 0 and below 1"):
        check_run(tiny_run(verify={"activation_error": 1.5}))

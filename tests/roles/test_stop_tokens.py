"""The rule of the stop tokens in whole runs: the log names it where the policy has its own, and every role obeys it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.config import RunConfig, TinyPolicy
from shoal.models.config import write_json
from shoal.models.random_model import make_tiny
from shoal.protocol import messages as t
from shoal.protocol.constants import CONTROL_STOPS, MODEL_STOPS
from shoal.protocol.encoding import from_msgpack
from shoal.roles.node import lifecycle
from shoal.runs.log_follower import creation_of
from tests.roles.testbed import RunTestbed, tiny_run, weights_of_one_file

END = 5
GENERATION = {"eos_token_id": END, "pad_token_id": 3, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
HOSTED = [{"name": "arithmetic", "kind": "completions"}]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A policy that ends its turns with one of its six control tokens."""
    directory = tmp_path / "policy"
    tiny = TinyPolicy(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, max_positions=64)
    make_tiny(tiny, directory, seed=3, dtype="float32")
    write_json(directory / "generation_config.json", GENERATION)
    return directory


def _config(policy: Path, **changes: object) -> RunConfig:
    return tiny_run(**{"steps": 2, "storage": {"retain": "all"}, "policy": {"path": str(policy)}, **changes})


def _lived(testbed: RunTestbed) -> RunTestbed:
    worker = testbed.worker("worker-0", own_files=False)
    asyncio.run(testbed.live(testbed.trainer(), testbed.validator(), worker))
    assert testbed.audit().findings == []
    assert testbed.coordinator.state.members[worker.key].refused == 0
    return testbed


def _turns(testbed: RunTestbed) -> Iterator[list[int]]:
    """The tokens of each rollout that the policy wrote, up to the last."""
    for name in testbed.coordinator.state.submissions:
        for data in from_msgpack(testbed.coordinator.blobs.get(name), t.Submission).groups:
            for rollout in from_msgpack(data, t.Group).rollouts:
                (row,) = rollout.rows()
                yield row.tokens_T[row.author_T == t.POLICY].tolist()


def test_turns_end_where_the_policy_says_and_the_log_names_the_rule(tmp_path: Path, own: Path) -> None:
    config = _config(own, envs=HOSTED)
    testbed = _lived(RunTestbed(tmp_path / "run", config))
    written = list(_turns(testbed))
    assert any(token < END for tokens in written for token in tokens[:-1])  # other control tokens end nothing
    assert any(END in tokens for tokens in written) and all(END not in tokens[:-1] for tokens in written)
    assert creation_of(testbed.folder.log).sampling.stops == MODEL_STOPS
    assert testbed.weights() == weights_of_one_file(config, tmp_path / "one")
    kept = json.loads((testbed.folder.checkpoints / "final" / "generation_config.json").read_text())
    assert kept == GENERATION


def test_a_run_whose_rules_are_the_same_has_the_log_of_before(tmp_path: Path, own: Path) -> None:
    write_json(own / "generation_config.json", {"eos_token_id": [5, 4, 3, 2, 1, 0]})
    for place, config in (("path", _config(own)), ("tiny", tiny_run())):
        testbed = RunTestbed(tmp_path / place, config)
        (data, _) = next(iter(testbed.coordinator.log_writer.store.read(limit=1)))
        assert b'"stops"' not in data


def test_a_worker_that_stops_at_every_control_token_is_refused(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = RunTestbed(tmp_path / "run", _config(own, steps=1))
    honest, cheat = testbed.worker("honest", own_files=False), testbed.worker("cheat", own_files=False)
    made = lifecycle.contained

    class Later:
        """The honest worker, once the other was refused, so that the other gets a lease."""

        async def run(self) -> None:
            while not testbed.coordinator.state.members[cheat.key].refused:
                await asyncio.sleep(0.01)
            await honest.run()

    async def scenario() -> None:
        monkeypatch.setattr(lifecycle, "contained", lambda limits, stops: made(limits, CONTROL_STOPS))
        running = asyncio.create_task(cheat.run())
        while not hasattr(cheat, "session"):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(lifecycle, "contained", made)
        await testbed.live(testbed.trainer(), testbed.validator(), Later())  # type: ignore[arg-type]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    members = testbed.coordinator.state.members
    assert members[cheat.key].refused > 0 == members[honest.key].refused

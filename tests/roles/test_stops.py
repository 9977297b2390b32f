"""The rule of the stop tokens in whole runs: the log names it where the policy has its own, and every role obeys it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.config import RunConfig, TinyPolicy, sampling_of
from shoal.config.role_options import EvalOptions
from shoal.jobs import evaluate
from shoal.models.config import write_json
from shoal.models.random_model import make_tiny
from shoal.net.client import Client
from shoal.net.safe_http import SHOAL
from shoal.protocol import messages as t
from shoal.protocol.constants import CONTROL_STOPS, MODEL_STOPS, PROTOCOL_VERSION
from shoal.protocol.encoding import from_msgpack, to_json
from shoal.protocol.signing import Key
from shoal.roles import validator
from shoal.roles.coordinator import main as coordinator
from shoal.roles.node import node
from shoal.runs.log import creation_of
from tests.roles.in_memory_run import Town, tiny_run, weights_of_one_file

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


def _lived(town: Town) -> Town:
    worker = town.worker("worker-0", own_files=False)
    asyncio.run(town.live(town.trainer(), town.validator(), worker))
    assert town.audit().findings == []
    assert town.desk.state.members[worker.key].refused == 0
    return town


def _turns(town: Town) -> Iterator[list[int]]:
    """The tokens of each rollout that the policy wrote, up to the last."""
    for name in town.desk.state.submissions:
        for data in from_msgpack(town.desk.blobs.get(name), t.Submission).groups:
            for rollout in from_msgpack(data, t.Group).rollouts:
                (row,) = rollout.rows()
                yield row.tokens_T[row.author_T == t.POLICY].tolist()


@pytest.mark.parametrize("envs", [[{"name": "arithmetic"}], HOSTED])
def test_turns_end_where_the_policy_says_and_the_log_names_the_rule(tmp_path: Path, own: Path, envs: object) -> None:
    config = _config(own, envs=envs)
    town = _lived(Town(tmp_path / "run", config))
    written = list(_turns(town))
    assert any(token < END for tokens in written for token in tokens[:-1])  # other control tokens end nothing
    assert any(END in tokens for tokens in written) and all(END not in tokens[:-1] for tokens in written)
    assert creation_of(town.folder.log).sampling.stops == MODEL_STOPS
    assert town.weights() == weights_of_one_file(config, tmp_path / "one")
    kept = json.loads((town.folder.checkpoints / "final" / "generation_config.json").read_text())
    assert kept == GENERATION


@pytest.mark.parametrize(("envs", "last"), [([{"name": "arithmetic"}], "/submission"), (HOSTED, "/turns")])
def test_a_worker_that_is_told_to_stop_leaves_a_host_that_is_gone(
    tmp_path: Path, envs: object, last: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host falls silent in the middle of a turn, or when it is sent a lease."""
    monkeypatch.setattr(node, "GOODBYE_S", 0.5)
    town = Town(tmp_path / "run", tiny_run(envs=envs))
    others, host, silent = (town.trainer(), town.validator()), town.app, asyncio.Event()

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        if silent.is_set() or scope["path"].endswith(last):
            silent.set()
            await asyncio.sleep(3600)
        await host(scope, receive, send)

    town.app = app
    worker, ended = town.worker("one", own_files=False), list[str]()
    worker.node.leave_at_once = lambda: ended.append("at once")

    async def live() -> float:
        tasks = [asyncio.create_task(role.run()) for role in others]
        working = asyncio.create_task(worker.run())
        await silent.wait()
        began = asyncio.get_running_loop().time()
        worker.stopping.set()
        await working
        for task in tasks:
            task.cancel()
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(asyncio.wait_for(live(), 60)) < 5 and ended == ["at once"]
    assert "the host does not answer: leases 0 are lost" in caplog.text


def test_a_validator_that_is_told_to_stop_leaves_a_host_that_is_gone_in_the_middle_of_a_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "GOODBYE_S", 0.5)
    town = Town(tmp_path / "run", tiny_run())
    silent, release, host, ended = threading.Event(), threading.Event(), town.app, list[str]()

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        if silent.is_set():
            await asyncio.sleep(3600)
        await host(scope, receive, send)

    def judge(*args: object) -> None:
        silent.set()
        release.wait(30)

    town.app = app
    monkeypatch.setattr(validator, "verify_submission", judge)
    judging = town.validator()
    judging.node.leave_at_once = lambda: ended.append(judging.in_hand)

    async def live() -> None:
        others = [asyncio.create_task(role.run()) for role in (town.trainer(), town.worker("one", own_files=False))]
        task = asyncio.create_task(judging.run())
        while not silent.is_set():
            await asyncio.sleep(0.05)
        judging.stopping.set()
        await asyncio.wait_for(task, 10)
        release.set()
        for other in others:
            other.cancel()

    asyncio.run(live())
    assert len(ended) == 1 and f"the judgement of submission {ended[0][:12]} is lost" in caplog.text and ended[0]


@pytest.mark.parametrize("status", [403, 429, 503, 0])
def test_a_refusal_is_an_answer_to_a_goodbye(status: int) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if not status:
            raise httpx.ConnectError("no route")
        body = t.Refusal(error="too many requests", code="rate")
        return httpx.Response(status, headers={SHOAL: str(PROTOCOL_VERSION)}, stream=httpx.ByteStream(to_json(body)))

    async def leave() -> bool:
        async with Client("http://host.test", Key.generate(), transport=httpx.MockTransport(answer)) as client:
            return await node.say_goodbye(client, 0.3)

    assert asyncio.run(leave()) == bool(status)


def test_a_run_whose_rules_are_the_same_has_the_log_of_before(tmp_path: Path, own: Path) -> None:
    write_json(own / "generation_config.json", {"eos_token_id": [5, 4, 3, 2, 1, 0]})
    for place, config in (("path", _config(own)), ("tiny", tiny_run())):
        town = Town(tmp_path / place, config)
        (data, _) = next(iter(town.desk.book.store.read(limit=1)))
        assert b'"stops"' not in data


def test_a_resumed_run_of_before_keeps_the_control_rule(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log names no rule, though the policy has tokens of its own."""
    monkeypatch.setattr(coordinator, "_sampling", lambda folder, config: sampling_of(config))
    town = _lived(Town(tmp_path / "run", _config(own)))
    assert creation_of(town.folder.log).sampling.stops == CONTROL_STOPS
    assert all(token > END for tokens in _turns(town) for token in tokens[:-1])
    final = town.folder.checkpoints / "final"
    options = EvalOptions(checkpoint=str(final), out=str(tmp_path / "found.json"), one_in=4)
    evaluate.for_run(town.folder.root, options)
    assert json.loads((tmp_path / "found.json").read_text())["episodes"] >= evaluate.MIN_EPISODES


def test_a_worker_that_stops_at_every_control_token_is_refused(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town(tmp_path / "run", _config(own, steps=1))
    honest, cheat = town.worker("honest", own_files=False), town.worker("cheat", own_files=False)
    made = node.contained

    class Later:
        """The honest worker, once the other was refused, so that the other gets a lease."""

        async def run(self) -> None:
            while not town.desk.state.members[cheat.key].refused:
                await asyncio.sleep(0.01)
            await honest.run()

    async def story() -> None:
        monkeypatch.setattr(node, "contained", lambda limits, stops: made(limits, CONTROL_STOPS))
        running = asyncio.create_task(cheat.run())
        while not hasattr(cheat, "session"):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(node, "contained", made)
        await town.live(town.trainer(), town.validator(), Later())  # type: ignore[arg-type]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
    members = town.desk.state.members
    assert members[cheat.key].refused > 0 == members[honest.key].refused

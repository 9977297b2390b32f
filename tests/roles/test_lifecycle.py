"""How a node leaves: with its work handed in, or at once where the host is gone."""

import asyncio
import gc
import threading
from pathlib import Path

import httpx
import pytest

from shoal.errors import PeerError
from shoal.net.client import Client
from shoal.net.safe_http import SHOAL
from shoal.net.server_address import Stopping
from shoal.protocol import messages as t
from shoal.protocol.constants import PROTOCOL_VERSION
from shoal.protocol.encoding import to_json
from shoal.protocol.signing import Key
from shoal.roles import validator
from shoal.roles.node import lifecycle
from tests.roles.testbed import RunTestbed, tiny_run

HOSTED = [{"name": "arithmetic", "kind": "completions"}]


@pytest.mark.parametrize(("envs", "last"), [([{"name": "arithmetic"}], "/submission"), (HOSTED, "/turns")])
def test_a_worker_that_is_told_to_stop_leaves_a_host_that_is_gone(
    tmp_path: Path, envs: object, last: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host falls silent in the middle of a turn, or when it is sent a lease."""
    monkeypatch.setattr(lifecycle, "GOODBYE_S", 0.5)
    testbed = RunTestbed(tmp_path / "run", tiny_run(envs=envs))
    others, host, silent = (testbed.trainer(), testbed.validator()), testbed.app, asyncio.Event()

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        if silent.is_set() or scope["path"].endswith(last):
            silent.set()
            await asyncio.sleep(3600)
        await host(scope, receive, send)

    testbed.app = app
    worker, ended = testbed.worker("one", own_files=False), list[str]()
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
    monkeypatch.setattr(lifecycle, "GOODBYE_S", 0.5)
    testbed = RunTestbed(tmp_path / "run", tiny_run())
    silent, release, host, ended = threading.Event(), threading.Event(), testbed.app, list[str]()

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        if silent.is_set():
            await asyncio.sleep(3600)
        await host(scope, receive, send)

    def judge(*args: object) -> None:
        silent.set()
        release.wait(30)

    testbed.app = app
    monkeypatch.setattr(validator, "verify_submission", judge)
    judging = testbed.validator()
    judging.node.leave_at_once = lambda: ended.append(judging.in_hand)

    async def live() -> None:
        others = [
            asyncio.create_task(role.run()) for role in (testbed.trainer(), testbed.worker("one", own_files=False))
        ]
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
            return await lifecycle.say_goodbye(client, 0.3)

    assert asyncio.run(leave()) == bool(status)


def test_work_that_fails_as_it_is_left_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "GOODBYE_S", 0.1)

    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise PeerError("the connection was lost")

    async def leave() -> bool:
        stopping = Stopping()
        stopping.set()
        async with Client("http://host.test", Key.generate(), transport=httpx.MockTransport(silent)) as client:
            return await lifecycle.unless_gone(work(), stopping, client, lambda: None)

    assert not asyncio.run(leave())
    gc.collect()
    assert "never retrieved" not in caplog.text

"""A run's host, relays, a worker that shares and a newcomer, as processes over real HTTP and lines of given rates."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.measure import shoal_command
from benchmarks.swarm.processes import Process, free_port, listed
from shoal.protocol.messages import Manifest
from shoal.run_folder import RunFolder
from shoal.weights import publish
from shoal.weights.manifest import is_whole
from tests.net.fault_proxy import FaultProxy
from tests.roles.testbed import RunTestbed, tiny_run

RATE = 200_000
"""Bytes a second, of each uplink: the newcomer is slow."""

RELAYS = ["relay0", "relay1"]

BUFFERED = 300_000
"""Bytes that are in the buffers of sockets and of the proxy when a process is killed."""


async def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.05)


async def lived(root: Path, port: int, origin_port: int, origin_url: str) -> dict[int, Manifest]:
    """A run of five steps has ended: versions 0 and 3 are published whole, and the others as patches."""
    host = {"port": port, "origin_port": origin_port, "origin_url": origin_url}
    testbed = RunTestbed(root, tiny_run(
        train={"lr": 1e-6}, steps=5, storage={"anchor_every": 3}, host=host,
        policy={"dtype": "bfloat16", "tiny": {
            "width": 192, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_width": 768, "max_positions": 64}},
    ))  # fmt: skip
    await testbed.live(testbed.trainer(), testbed.validator(), testbed.worker("worker-0"))
    testbed.coordinator.log_writer.store.close()
    return dict(testbed.coordinator.kept.manifests)


def needed_bytes(manifests: dict[int, Manifest]) -> int:
    """What a newcomer needs of version 5: version 3 whole, and the patches to 4 and 5."""
    assert [is_whole(manifests[version]) for version in range(6)] == [True, False, False] * 2
    whole = sum(file.size for file in manifests[3].files)
    return whole + sum(manifests[version].patches[0].file.size for version in (4, 5))


class Host:
    """The processes of a run, each behind a line of its own."""

    def __init__(self, root: Path, stack: contextlib.AsyncExitStack) -> None:
        self.root, self._stack = root, stack
        self.ports: dict[str, int] = {}
        self.lines: dict[str, FaultProxy] = {}

    async def line(self, name: str) -> str:
        """A process that is to come gets a line. Returns its URL."""
        self.ports[name] = free_port()
        proxy = FaultProxy(self.ports[name], random.Random(0), bytes_per_s=0.0)
        self.lines[name] = await self._stack.enter_async_context(proxy)
        return f"http://127.0.0.1:{self.lines[name].port}"

    def start(self, name: str, command: list[str]) -> Process:
        process = Process(name, command, self.root / f"{name}.log")
        process.start()
        self._stack.callback(process.kill)
        return process

    def said(self, process: Process) -> str:
        return process.log.read_text()

    def passed(self, *names: str) -> int:
        return sum(self.lines[name].passed_bytes for name in names)


def follower(*args: object) -> list[str]:
    return [sys.executable, "-m", "tests.roles.follower", *map(str, args)]


@pytest.mark.slow
def test_a_slow_newcomer_behind_relays_and_a_sharer_is_killed_twice_and_gets_the_newest_version(tmp_path, monkeypatch):
    """Most bytes come from the relays, none from the coordinator, and few come twice."""
    monkeypatch.setattr(publish, "chunk_bytes_for", lambda size_bytes: 1 << 16)

    async def scenario(stack: contextlib.AsyncExitStack) -> None:
        host, run = Host(tmp_path, stack), tmp_path / "run"
        urls = {name: await host.line(name) for name in ("coordinator", "origin", "sharer", *RELAYS)}
        manifests = await lived(run, host.ports["coordinator"], host.ports["origin"], f"{urls['origin']}/v1/blobs")
        needed = needed_bytes(manifests)
        host.start("coordinator", shoal_command("role", "coordinator", "--run-dir", run))
        host.start("origin", shoal_command("role", "origin", "--run-dir", run))
        await until(lambda: RunFolder(run).address.exists())
        url = urls["coordinator"]
        for name in RELAYS:
            where = ("--bind", "127.0.0.1", "--port", host.ports[name], "--public-url", urls[name])
            host.start(name, shoal_command("relay", url, *where, "--home", tmp_path / name))
        share = ("--share", host.ports["sharer"], urls["sharer"])
        sharer = host.start("sharer", follower(url, tmp_path / "sharer", 3, 4, *share))
        await listed(url, 3)
        await until(lambda: "version=4 is here" in host.said(sharer), 30)
        for name in RELAYS:
            await until(lambda name=name: "version=5 is here whole=True" in (tmp_path / f"{name}.log").read_text(), 30)

        sources = ("sharer", *RELAYS)
        for name in (*sources, "origin"):
            host.lines[name].line.rate(RATE)
        before = {name: host.passed(name) for name in host.lines}

        def came(*names: str) -> int:
            return host.passed(*names) - sum(before[name] for name in names)

        newcomer = host.start("newcomer", follower(url, tmp_path / "newcomer", 5))
        for share_of_all in (0.3, 0.6):
            await until(lambda share_of_all=share_of_all: came(*sources) > share_of_all * needed, 60)
            newcomer.kill()
            newcomer.start()
        await until(lambda: "version=5 is here" in host.said(newcomer), 60)
        assert not list((tmp_path / "newcomer").glob("weights/.partial-*"))
        print({name: came(name) for name in host.lines}, needed)
        assert came(*RELAYS) > 0.5 * needed and came("sharer") > 0.05 * needed
        assert came("origin") < 0.1 * needed and came("coordinator") < 0.1 * needed
        assert came(*host.lines) < 1.1 * needed + 2 * BUFFERED

    async def all_of_it() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await scenario(stack)

    asyncio.run(asyncio.wait_for(all_of_it(), 240))

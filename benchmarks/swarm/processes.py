"""A host, relays and clients as real processes, with shaped uplinks: what `benchmarks/broadcast.py` measures.

The host publishes one version of random weights. The uplinks of the host, relays and sharing clients are
shaped by `links`; coordinator and origin share that of the host, as they share a machine. Everything else is loopback.
"""

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.measure import shoal_command
from benchmarks.swarm.links import Link, shaped
from shoal.config import RunConfig
from shoal.net.client import Client
from shoal.net.key_files import load_or_make_key
from shoal.protocol.encoding import to_json
from shoal.protocol.messages import WriteAck
from shoal.run_folder import RunFolder
from shoal.typed_toml import from_tree
from shoal.weights.manifest import sign_manifest
from shoal.weights.publish import HttpSink, PublishSettings, publish

MB = 1_000_000

RUN = {
    "name": "broadcast",
    "steps": 1,
    "seed": 5,
    "envs": [{"name": "arithmetic"}],
    "sampling": {"max_turn_tokens": 6, "max_tokens": 64},
    "policy": {"tiny": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 64, "max_positions": 64}},
    "storage": {"quota_mb": 100_000},
}


def make_run(root: Path, size_mb: int, port: int, origin_port: int, origin_url: str) -> RunFolder:
    """A run's folder without a version, and beside it weights of `size_mb`."""
    folder = RunFolder(root / "run")
    host = {"port": port, "origin_port": origin_port, "origin_url": origin_url}
    folder.prepare(from_tree({**RUN, "host": host}, RunConfig, "benchmark"), root)
    weights = root / "weights"
    weights.mkdir()
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.integers(0, 2**32, size_mb * MB // 40, dtype=np.uint32).view(np.float32) for i in range(10)}
    save_file(tensors, weights / "model.safetensors")
    (weights / "config.json").write_text("{}")
    return folder


@dataclass
class Process:
    """A role, with its log."""

    name: str
    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        """Start it, or start it again."""
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self.starts += 1

    def cpu_s(self) -> float:
        """CPU-seconds so far, while it runs."""
        assert self.popen is not None
        times = psutil.Process(self.popen.pid).cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait()


@dataclass
class Swarm:
    """The host's processes and the relays, with their links."""

    root: Path
    folder: RunFolder
    url: str = ""
    origin: Process | None = None
    coordinator: Process | None = None
    relays: list[Process] = field(default_factory=list)
    clients: list[Process] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)

    async def publish(self, chunk_bytes: int) -> float:
        """Publish the version as the trainer does; returns when it was there."""
        key = load_or_make_key(self.folder.keys / "trainer.key")
        async with Client(self.url, key, run=self.folder.run_id()) as client:
            manifest = await publish(
                self.root / "weights", HttpSink(client), PublishSettings(client.run, 0, "float32", chunk_bytes)
            )
            signed = to_json(sign_manifest(manifest, key, now=time.time()))
            await client.send("POST", "/v1/checkpoints", signed, WriteAck)
        return time.time()

    def egress(self, *names: str) -> int:
        """Bytes that some sent."""
        return sum(self.links[name].passed_bytes for name in names)

    def cpu_s(self) -> dict[str, float]:
        """CPU-seconds of each role so far, of those processes that still run, and of the links."""
        assert self.origin is not None and self.coordinator is not None
        people = {"origin": [self.origin], "coordinator": [self.coordinator], "relays": self.relays}
        return {"links": time.process_time()} | {
            role: sum(process.cpu_s() for process in processes) for role, processes in people.items()
        }


def free_port() -> int:
    """A port that nobody has now, and that the system gives to no connection before it is listened at."""
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free from 20000 to 32000")


@contextlib.asynccontextmanager
async def swarm(
    root: Path, size_mb: int, uplinks: dict[str, float], seed: int, relays: Collection[str]
) -> AsyncIterator[Swarm]:
    """A host, and processes of `relays` that are not started; uplinks are bytes a second, that of "origin" the host's."""
    shares = {"coordinator": "origin"}
    ports = {name: free_port() for name in (*uplinks, *shares)}
    async with shaped(ports, uplinks, seed, shares) as links:
        origin_url = f"http://127.0.0.1:{links['origin'].port}/v1/blobs"
        folder = await asyncio.to_thread(make_run, root, size_mb, ports["coordinator"], ports["origin"], origin_url)
        made = Swarm(root, folder, links=links, ports=ports)
        made.coordinator = Process(
            "coordinator", shoal_command("role", "coordinator", "--run-dir", folder.root), root / "coordinator.log"
        )
        made.origin = Process("origin", shoal_command("role", "origin", "--run-dir", folder.root), root / "origin.log")
        try:
            made.coordinator.start()
            made.origin.start()
            await _url_of(folder)
            made.url = f"http://127.0.0.1:{links['coordinator'].port}"
            made.relays = [relay(made, name) for name in relays]
            yield made
        finally:
            for process in (*made.clients, *made.relays, made.origin, made.coordinator):
                if process.popen is not None:
                    process.kill()


def relay(made: Swarm, name: str) -> Process:
    """A relay's process behind its link, not started."""
    public = f"http://127.0.0.1:{made.links[name].port}"
    where = ("--bind", "127.0.0.1", "--port", made.ports[name], "--public-url", public, "--home", made.root / name)
    return Process(name, shoal_command("relay", made.url, *where), made.root / f"{name}.log")


async def _url_of(folder: RunFolder) -> None:
    async with httpx.AsyncClient() as http:
        for _ in range(600):
            with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
                url: str = json.loads(folder.address.read_text())["url"]
                if (await http.get(f"{url}/healthz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise TimeoutError("the coordinator did not answer")


async def listed(url: str, count: int, limit_s: float = 60.0) -> None:
    """Wait until so many relays are listed."""
    async with httpx.AsyncClient() as http, asyncio.timeout(limit_s):
        while True:
            if len((await http.get(f"{url}/v1/relays")).json()) >= count:
                return
            await asyncio.sleep(0.2)


def client(made: Swarm, name: str, home: str = "") -> Process:
    """A client's process, not started; one with a link shares."""
    share = [str(made.ports[name]), f"http://127.0.0.1:{made.links[name].port}"] if name in made.links else []
    command = [sys.executable, "-m", "benchmarks.swarm.client", made.url, str(made.root / (home or name)), *share]
    return Process(name, command, made.root / f"{name}.log")


async def ended(processes: list[Process]) -> list[dict[str, Any]]:
    """Wait for clients; what each wrote last."""
    for process in processes:
        assert process.popen is not None
        if await asyncio.to_thread(process.popen.wait):
            raise RuntimeError(f"{process.name} failed: {process.log.read_text()[-2000:]}")
    return [json.loads(process.log.read_text().splitlines()[-1]) for process in processes]


async def whole(made: Swarm, names: Collection[str]) -> None:
    """Wait until relays have everything."""
    while True:
        if all("whole=True" in (made.root / f"{name}.log").read_text() for name in names):
            return
        await asyncio.sleep(0.2)

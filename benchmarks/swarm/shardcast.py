"""The same broadcast with the package shardcast 0.3.2, on the same links.

Its processes write to one fixed file in /tmp and to one in the package's folder, and a server must hold a file named
data1.bin that nothing makes. So each process gets a copy of the package with paths of its own, and each server that file.
"""

# ruff: noqa: ASYNC110

import asyncio
import contextlib
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.swarm.links import shaped
from benchmarks.swarm.processes import MB, Process, free_port

LIMIT = 6.0
"""Times the bound: then it is given up."""


class Settings(NamedTuple):
    """What a user can choose."""

    shard_mb: float
    lanes: int


class Took(NamedTuple):
    """What a broadcast took."""

    took_s: float
    copies: float


async def broadcast(
    venv: Path, root: Path, size_mb: int, rate: float, clients: int, relays: int, seed: int, settings: Settings
) -> Took:
    """Time to the last of the clients. Raises `RuntimeError` if one fails."""
    data = root / "model.bin"
    data.write_bytes(np.random.default_rng(0).integers(0, 256, size_mb * MB, dtype=np.uint8).tobytes())
    ports = [free_port() for _ in range(relays + 1)]
    async with contextlib.AsyncExitStack() as stack:
        names = {str(i): port for i, port in enumerate(ports)}
        made = await stack.enter_async_context(shaped(names, dict.fromkeys(names, rate), seed))
        links = [*made.values()]
        processes: list[Process] = []
        stack.callback(lambda: [process.kill() for process in processes if process.popen])
        origin = (
            "import sys, time; from shardcast.origin_server import OriginServer\n"
            "o = OriginServer(sys.argv[1], int(sys.argv[2]))\n"
            "time.sleep(float(sys.argv[4]))\n"
            "o.broadcast(sys.argv[3], int(sys.argv[5]))\n"
            "while True: time.sleep(1)"
        )
        (root / "origin").mkdir()
        (root / "origin" / "data1.bin").write_bytes(b"x" * 10_000)
        shard = str(int(settings.shard_mb * MB))
        processes.append(
            _process(venv, root, "o", settings, ["-c", origin, root / "origin", ports[0], data, 5.0, shard])
        )
        processes[0].start()
        await _serving(ports[0])
        for i in range(relays):
            home = root / f"relay{i}"
            home.mkdir()
            (home / "data1.bin").write_bytes(b"x" * 10_000)
            command = ["-m", "shardcast.middle_node", "--upstream", f"http://127.0.0.1:{links[0].port}", "--data-dir", home,
                       "--port", ports[i + 1], "--check-interval", 1]  # fmt: skip
            processes.append(_process(venv, root, f"m{i}", settings, command))
            processes[-1].start()
            await _serving(ports[i + 1])
        await _told(root / "origin")
        began, servers = time.time(), ",".join(f"http://127.0.0.1:{link.port}" for link in links[1:])
        for i in range(relays):
            await _told(root / f"relay{i}")
        fetching = []
        for i in range(clients):
            command = [
                "-m",
                "shardcast.client_node",
                "--servers",
                servers,
                "--output-dir",
                root / f"c{i}",
                "--version",
                "v1",
            ]
            fetching.append(_process(venv, root, f"c{i}", settings, command))
            fetching[-1].start()
        processes += fetching
        limit_s = LIMIT * (clients + relays) * size_mb * MB / ((relays + 1) * rate)
        async with asyncio.timeout(limit_s):
            for process in fetching:
                assert process.popen is not None
                while process.popen.poll() is None:
                    await asyncio.sleep(0.1)
                if process.popen.returncode:
                    raise RuntimeError(process.log.read_text()[-500:])
        return Took(time.time() - began, links[0].passed_bytes / (size_mb * MB))


def _process(venv: Path, root: Path, name: str, settings: Settings, args: list[object]) -> Process:
    """A Python process with a copy of the package of its own."""
    own = root / f"package-{name}"
    source = next(venv.glob("lib/python*/site-packages/shardcast"))
    shutil.copytree(source, own / "shardcast")
    text = (own / "shardcast" / "client.py").read_text()
    (own / "shardcast" / "client.py").write_text(text.replace("/tmp/dummy.bin", str(own / "dummy.bin")))
    told = {
        "PYTHONPATH": own, "SHARDCAST_MAX_CONCURRENT_DOWNLOADS": settings.lanes, "SHARDCAST_FAST_RETRY_INTERVAL": 1,
        "SHARDCAST_SLOW_RETRY_INTERVAL": 1,
    }  # fmt: skip
    command = ["env", *(f"{key}={value}" for key, value in told.items()), str(venv / "bin" / "python"), *map(str, args)]
    return Process(name, command, root / f"{name}.log")


async def _told(folder: Path) -> None:
    """Wait until a server tells of the version; before, it may tell of none."""
    path = folder / "distribution.txt"
    while True:
        with contextlib.suppress(OSError):
            if path.read_text():
                return
        await asyncio.sleep(0.02)


async def _serving(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /data1.bin HTTP/1.0\r\n\r\n")
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"nothing listens at {port}")

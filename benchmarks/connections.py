"""What strangers' connections cost a coordinator: idle ones, headers without end, large bodies that nobody signed.

    python benchmarks/connections.py [--idle 1100] [--seconds 5]

A coordinator with a limit of 1,024 open files, the default of most systems, serves an empty run on loopback. An honest
client joins again and again, each time with a new key over a new connection, so that each answer needs a connection,
a file and a commit. Measured: joins a second before and while the idle connections are held, and the growth of the
coordinator's memory under a header without end and under unsigned bodies. Attacks stay on this machine and end within
seconds. Ends with one JSON line.
"""

import asyncio
import contextlib
import json
import multiprocessing
import random
import resource
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil

from benchmarks.measure import arguments, report, shoal_command
from shoal.config import RunConfig
from shoal.errors import PeerError
from shoal.net.client import Client
from shoal.protocol import messages as t
from shoal.protocol.signing import Key
from shoal.run_folder import RunFolder
from shoal.typed_toml import from_tree

RUN = {"name": "connections", "steps": 1, "envs": [{"name": "arithmetic"}]}
OPEN_FILES = 1024
PAUSE_S = 2.0
HEADER_BYTES, HEADER_S = 400 << 20, 2.0
BODIES, BODY_BYTES, BODIES_S = 25, 63 << 20, 10.0
PART = b"x" * (256 << 10)


def main() -> None:
    """Measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--idle", type=int, default=1100, help="idle connections")
    parser.add_argument("--seconds", type=float, default=5.0, help="that each rate is measured")
    asked = parser.parse_args()
    figures: dict[str, object] = {"idle_connections": asked.idle, "open_files": OPEN_FILES}
    with coordinator() as (process, port):
        figures |= asyncio.run(idle_flood(port, asked.idle, asked.seconds))
    with coordinator() as (process, port):
        figures["endless_header"] = asyncio.run(endless_header(process, port))
    with coordinator() as (process, port):
        figures["unsigned_bodies"] = asyncio.run(unsigned_bodies(process, port))
    for name, value in figures.items():
        print(f"{name:>24}  {value}")
    report("connections", figures)


@contextlib.contextmanager
def coordinator() -> Iterator[tuple[psutil.Process, int]]:
    """A coordinator of an empty run, as a process, and its port."""
    with tempfile.TemporaryDirectory(prefix="shoal-connections-") as name:
        folder = RunFolder(Path(name) / "run")
        folder.prepare(from_tree(RUN, RunConfig, "benchmark"), Path(name))
        command = shoal_command("role", "coordinator", "--run-dir", str(folder.root))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=_limit_files)
        try:
            while not folder.address.exists():
                time.sleep(0.05)
                assert process.poll() is None, "the coordinator did not start"
            yield psutil.Process(process.pid), int(json.loads(folder.address.read_text())["port"])
        finally:
            process.kill()
            process.wait()


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


# --- idle connections ---


async def idle_flood(port: int, count: int, seconds: float) -> dict[str, object]:
    """Joins a second, alone and beside a process that holds idle connections."""
    run = await run_id(port)
    await joins(port, run, 1.0)  # warm
    alone, _ = await joins(port, run, seconds)
    stranger = multiprocessing.get_context("spawn").Process(target=hold_all, args=(port, count))
    stranger.start()
    await asyncio.sleep(5.0)
    beside, trouble = await joins(port, run, seconds)
    stranger.kill()
    stranger.join()
    await asyncio.sleep(1.0)
    after, _ = await joins(port, run, seconds)
    rates = {"alone": alone, "beside_idle": beside, "afterwards": after}
    return {"joins_per_s": {name: round(rate, 2) for name, rate in rates.items()}, "trouble": trouble}


def hold_all(port: int, count: int) -> None:
    """Hold idle connections for good; one that is closed is made again after a while."""

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(PAUSE_S)

    async def hold_each() -> None:
        await asyncio.gather(*(hold() for _ in range(count)))

    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(OPEN_FILES, 2 * count), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    asyncio.run(hold_each())


async def joins(port: int, run: str, seconds: float) -> tuple[float, str]:
    """Joins a second of new workers, one after another, and the last trouble that one of them met."""
    began, done, trouble = time.monotonic(), 0, ""

    def hear(line: str) -> None:
        nonlocal trouble
        trouble = line.partition(": ")[2]

    while time.monotonic() - began < seconds:
        # One address adds few new keys, so they come from several.
        place = httpx.AsyncHTTPTransport(local_address=f"127.0.{random.randrange(1, 255)}.{random.randrange(1, 255)}")
        async with Client(f"http://127.0.0.1:{port}", Key.generate(), run=run, on_wait=hear, transport=place) as client:
            join = t.Join("worker", "honest", 0.0, "none", "float32", "cpu")
            try:
                await client.post_json("/v1/nodes", join, t.NodeState, deadline_s=seconds)
                done += 1
            except PeerError as error:
                hear(str(error))
    return done / (time.monotonic() - began), trouble


async def run_id(port: int) -> str:
    """The run's id: what a request must be meant for."""
    async with Client(f"http://127.0.0.1:{port}") as client:
        return (await client.get_json("/v1/run", t.RunInfo)).run


# --- memory ---


async def endless_header(process: psutil.Process, port: int) -> dict[str, object]:
    """One request whose headers never end."""
    async with peak_growth(process) as growth:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        sent, began = 0, time.monotonic()
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            while sent < HEADER_BYTES and time.monotonic() - began < HEADER_S and not writer.is_closing():
                writer.write(PART)
                await writer.drain()
                sent += len(PART)
        writer.close()
    return {"sent_mb": sent >> 20, "memory_mb": growth[0]}


async def unsigned_bodies(process: psutil.Process, port: int) -> dict[str, object]:
    """Large submissions without a signature, all at once, each held open before its last byte."""
    statuses: list[int] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"PUT /v1/leases/0/submission HTTP/1.1\r\nhost: x\r\ncontent-length: {BODY_BYTES}\r\n\r\n".encode()
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(BODY_BYTES // len(PART) - 1):
                writer.write(PART)
                await writer.drain()
        with contextlib.suppress(ConnectionError, TimeoutError, IndexError):
            async with asyncio.timeout(3.0):
                statuses.append(int((await reader.readline()).split()[1]))
        writer.close()

    async with peak_growth(process) as growth:
        async with asyncio.timeout(BODIES_S + 20.0):
            await asyncio.gather(*(one() for _ in range(BODIES)))
    return {"bodies": BODIES, "refused": statuses.count(401), "memory_mb": growth[0]}


@contextlib.asynccontextmanager
async def peak_growth(process: psutil.Process) -> AsyncIterator[list[int]]:
    """How many MB the process grew at most, from before until a moment after."""
    before, growth = process.memory_info().rss, [0]

    async def watch() -> None:
        while True:
            growth[0] = max(growth[0], (process.memory_info().rss - before) >> 20)
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    try:
        yield growth
        await asyncio.sleep(0.2)
    finally:
        watcher.cancel()


if __name__ == "__main__":
    main()

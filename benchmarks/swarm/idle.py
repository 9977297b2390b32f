"""A relay that many slow clients hold: how fast it still serves a quick one, and how much memory it takes."""

# ruff: noqa: ASYNC240

import asyncio
import resource
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

NUM_CONNECTIONS = 2000
OF_AN_ADDRESS = 200
MEASURE_S = 6.0


async def crowded_relay(port: int, pid: int, chunks: Path) -> dict[str, Any]:
    """Rates before and while 2,000 connections are held: half idle after an answer, half that asked and read nothing."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    names = [path.name for path in chunks.glob("??/*") if path.stat().st_size == 1 << 20]
    rates = {"before": [await rate(port, names)], "held": list[float]()}
    before_mb = psutil.Process(pid).memory_info().rss / 2**20
    held = []
    for i in range(NUM_CONNECTIONS):
        held.append(await connection(port, f"127.0.{1 + i // OF_AN_ADDRESS}.1", names[i % len(names)] if i % 2 else ""))
    for _ in range(2):
        rates["held"].append(await rate(port, names))
    held_mb = psutil.Process(pid).memory_info().rss / 2**20
    alive = sum(not reader.at_eof() for reader, _ in held)
    for _, writer in held:
        writer.transport.abort()
    await asyncio.sleep(1)
    rates["before"].append(await rate(port, names))
    before, during = (sum(each) / len(each) for each in rates.values())
    return {
        "mb_per_s_alone": before, "mb_per_s_crowded": during, "share": during / before, "rss_mb": held_mb,
        "rss_mb_before": before_mb, "connections": alive,
    }  # fmt: skip


async def connection(port: int, address: str, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has had an answer and is idle, or that asks for a chunk and reads nothing of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), limit=1024)
    path = f"/v1/blobs/{name}" if name else "/healthz"
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    if not name:
        await reader.read(1024)
    return reader, writer


async def rate(port: int, names: list[str]) -> float:
    """MB/s of one client with two connections."""
    total, end = 0, time.monotonic() + MEASURE_S

    async def lane(offset: int) -> None:
        nonlocal total
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            index = offset
            while time.monotonic() < end:
                async with http.stream("GET", f"/v1/blobs/{names[index % len(names)]}") as response:
                    async for part in response.aiter_raw(1 << 18):
                        total += len(part)
                index += 2

    began = time.monotonic()
    await asyncio.gather(lane(0), lane(1))
    return total / (time.monotonic() - began) / 1e6

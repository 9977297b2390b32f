"""What 500 questions a minute for metrics cost a coordinator that takes in writes.

    python benchmarks/scrapes.py [--rounds 6] [--seconds 10]

A coordinator serves an empty run on loopback. Workers join, one after another, each with a new key: each answer needs a
signature, a commit and an event. Rounds without and with a process that asks for `GET /metrics` alternate. Measured: the
latency of a join in both, and the coordinator's CPU-seconds for a page. Ends with one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a file

from benchmarks.connections import coordinator, run_id
from shoal.net.client import Client
from shoal.protocol import messages as t
from shoal.protocol.signing import Key

SCRAPES_PER_MIN = 500


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    asked = parser.parse_args()
    taken: dict[bool, list[float]] = {False: [], True: []}
    with coordinator() as (_, port):
        run = asyncio.run(run_id(port))
        asyncio.run(joins(port, run, 2.0))  # warm
        for _ in range(asked.rounds):
            for beside in (False, True):
                scraper = multiprocessing.get_context("spawn").Process(target=scrape, args=(port,))
                if beside:
                    scraper.start()
                    time.sleep(1.0)
                taken[beside] += asyncio.run(joins(port, run, asked.seconds))
                if beside:
                    scraper.kill()
                    scraper.join()
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
    scrapes = float(
        next(line for line in page.text.splitlines() if "GET /metrics" in line and "requests" in line).split()[-1]
    )
    figures = {"joins": sum(map(len, taken.values())), "scrapes": int(scrapes), "page_bytes": len(page.content)}
    for beside, name in ((False, "alone"), (True, "scraped")):
        cuts = statistics.quantiles(taken[beside], n=100)
        figures |= {f"{name}_median_ms": round(1e3 * cuts[49], 2), f"{name}_p99_ms": round(1e3 * cuts[98], 2)}
    for name, value in figures.items():
        print(f"{name:>20}  {value}")
    print(json.dumps({"benchmark": "scrapes", **figures}))


def scrape(port: int) -> None:
    """Ask for metrics for good, as one Prometheus server or as many."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        due = time.monotonic()
        while True:
            client.get("/metrics").raise_for_status()
            due += 60.0 / SCRAPES_PER_MIN
            time.sleep(max(0.0, due - time.monotonic()))


async def joins(port: int, run: str, seconds: float) -> list[float]:
    """Seconds that each of the joins took, over a connection that was open before."""
    began, taken = time.monotonic(), []
    while time.monotonic() - began < seconds:
        # One address adds few new keys, so they come from several.
        place = httpx.AsyncHTTPTransport(local_address=f"127.0.{random.randrange(1, 255)}.{random.randrange(1, 255)}")
        async with Client(f"http://127.0.0.1:{port}", Key.generate(), run=run, transport=place) as client:
            await client.get_json("/v1/status", t.Status)
            asked = time.perf_counter()
            await client.post_json("/v1/nodes", t.Join("worker", "honest", 0.0, "none", "float32", "cpu"), t.NodeState)
            taken.append(time.perf_counter() - asked)
    return taken


if __name__ == "__main__":
    main()

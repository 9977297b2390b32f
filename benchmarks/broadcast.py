"""One version of weights to many: time to the last client, what the origin sends, and what bad relays and kills cost.

    python benchmarks/broadcast.py [--quick] [--only NAME ...] [--mbit 200] [--sharing-mbit 50] [--namespace]
        [--shardcast VENV]

Real processes on one machine: a host, relays and clients. The uplinks of the host, relays and sharing clients are shaped by
`tests/net/fault_proxy` (seeded), or with `--namespace` by the kernel, which takes less CPU; coordinator and origin
share the host's. The *bound* is the time in which the uplinks together can carry all copies, or the host one. The machine's
own cores may limit more than the links: then lower --mbit, which scales all links alike. The output names the rate, the
share of CPU time that was used, and the CPU-ms of each role a MB that some process received, links included. `copies` is
what the host sent.

plain      8 clients through 3 relays
sharing    the same, and the clients share: twelve uplinks, so slower ones, since two cores have to carry all of them
bad        4 clients, six relays that have everything: three good, one killed midway, one that sends wrong bytes to clients
           and right ones to probes, one at 1/200 of the rate. The bound is that of the three good ones, and of the killed
           one while it lived; the host should send little
idle       a relay with 2,000 connections that are idle or read nothing: rate of a fast client, and its memory
kills      SIGKILLs of origin, relays and clients in turn while 3 clients fetch: bytes fetched again
shardcast  like plain, with the package shardcast 0.3.2 from a virtual environment. Each process gets a copy of the package
           of its own, because it shares files in /tmp and in its own folder; it checks every second, retries every second

The first three run --repeats times; the run of the median ratio is told, with the ratios of all. Ends with one JSON line.
The exit code says whether a bar was missed.
"""

# ruff: noqa: ASYNC240

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.measure import arguments, report
from benchmarks.swarm import shardcast
from benchmarks.swarm.idle import crowded_relay
from benchmarks.swarm.links import enter_namespace
from benchmarks.swarm.processes import MB, Process, client, ended, listed, swarm, whole

NUM_CLIENTS, NUM_RELAYS = 8, 3

HOST = ("coordinator", "origin")

REPEATED = ("plain", "sharing", "bad")

MOST = {
    "plain": {"ratio": 1.25, "copies": 3.1, "copies_of_coordinator": 0.05},
    "sharing": {"ratio": 1.25, "copies": 1.3, "copies_of_coordinator": 0.05},
    "bad": {"ratio": 1.5, "wasted": 0.02, "others_named": 0},
    "idle": {"rss_mb": 200.0},
    "kills": {"again": 0.05},
}
LEAST = {"bad": {"liar_named_by": 1}, "idle": {"share": 0.8}}
"""The bars of these figures."""


class Asked(argparse.Namespace):
    """The command line."""

    size_mb: int
    chunk_bytes: int
    sharing_mbit: float
    rate: float
    sharing_rate: float
    seed: int
    kills: int
    repeats: int
    venv: Path
    namespace: bool


def bound_s(size: float, rate: float, clients: int, relays: int, sharing: bool) -> float:
    """Seconds in which all uplinks together carry a copy to each client and relay, and the origin one copy."""
    links = relays + 1 + (clients if sharing else 0)
    return max(size / rate, (clients + relays) * size / (links * rate))


async def plain(asked: Asked, root: Path) -> dict[str, Any]:
    """8 clients through 3 relays that begin empty."""
    return await _swarm(asked, root, asked.rate, sharing=False)


async def sharing(asked: Asked, root: Path) -> dict[str, Any]:
    """The same, and clients share."""
    return await _swarm(asked, root, asked.sharing_rate, sharing=True)


async def _swarm(asked: Asked, root: Path, rate: float, *, sharing: bool) -> dict[str, Any]:
    relays = [f"relay{i}" for i in range(NUM_RELAYS)]
    names = [f"client{i}" for i in range(NUM_CLIENTS)]
    uplinks = dict.fromkeys(["origin", *relays, *(names if sharing else [])], rate)
    async with swarm(root, asked.size_mb, uplinks, asked.seed, relays) as made:
        for process in made.relays:
            process.start()
        await listed(made.url, NUM_RELAYS)
        made.clients = [client(made, name) for name in names]
        for process in made.clients:
            process.start()
        if sharing:
            await listed(made.url, NUM_RELAYS + NUM_CLIENTS)
        await asyncio.sleep(5)
        spent = made.cpu_s()
        before, began, cpu = (
            [made.egress(name) for name in HOST],
            await made.publish(asked.chunk_bytes),
            psutil.cpu_times(),
        )
        if sharing:  # they go on serving
            said = [await _said(made.root / name / "said.json") for name in names]
        else:
            said = await ended(made.clients)
        took = max(each["ended"] for each in said) - began
        sent = [made.egress(name) - already for name, already in zip(HOST, before, strict=True)]
        size, copies = asked.size_mb * MB, NUM_CLIENTS + NUM_RELAYS
        bound = bound_s(size, rate, NUM_CLIENTS, NUM_RELAYS, sharing)
        by_role = {role: cpu_s - spent[role] for role, cpu_s in made.cpu_s().items()}
        by_role["clients"] = sum(each["cpu_s"] for each in said)
        return {
            "uplink_mbit": rate * 8e-6, "took_s": took, "bound_s": bound, "ratio": took / bound, "copies": sum(sent) / size,
            "copies_of_coordinator": sent[0] / size,
            "cpu": _cpu_share(cpu),
            "cpu_ms_a_mb": {role: 1000 * cpu_s / (copies * asked.size_mb) for role, cpu_s in by_role.items()},
        }  # fmt: skip


async def bad(asked: Asked, root: Path) -> dict[str, Any]:
    """Six relays of which three are good."""
    good = ["good0", "good1", "good2"]
    uplinks = dict.fromkeys([*good, "killed", "liar", "origin"], asked.rate) | {"slow": asked.rate / 200}
    async with swarm(root, asked.size_mb, uplinks, asked.seed, [*good, "killed", "slow"]) as made:
        made.links["origin"].line.rate(0)  # they fill as fast as the machine can
        public = f"http://127.0.0.1:{made.links['liar'].port}"
        liar = [sys.executable, "-m", "benchmarks.swarm.liar", made.url, str(root / "liar")]
        made.relays.append(Process("liar", [*liar, str(made.ports["liar"]), public], root / "liar.log"))
        for process in made.relays:
            process.start()
        await listed(made.url, 6)
        await made.publish(asked.chunk_bytes)
        await whole(made, [process.name for process in made.relays])
        made.links["origin"].line.rate(asked.rate)
        made.clients = [client(made, f"client{i}") for i in range(4)]
        size, cpu, before = asked.size_mb * MB, psutil.cpu_times(), made.egress(*HOST)
        lived_s = 4 * size / (3 * asked.rate) / 2
        bound = (4 * size - lived_s * asked.rate) / (3 * asked.rate)
        for process in made.clients:
            process.start()
        await asyncio.sleep(lived_s)
        next(process for process in made.relays if process.name == "killed").kill()
        said = await ended(made.clients)
        took = max(each["ended"] for each in said) - min(each["began"] for each in said)
        wasted = sum(sum(each["got_bytes"].values()) for each in said) / (4 * size) - 1
        lying = [{name for name, reason in each["blamed"] if "wrong bytes" in reason} for each in said]
        return {
            "took_s": took, "bound_s": bound, "ratio": took / bound, "wasted": wasted,
            "liar_named_by": sum(public in each for each in lying), "others_named": len(set().union(*lying) - {public}),
            "copies": (made.egress(*HOST) - before) / size, "cpu": _cpu_share(cpu),
        }  # fmt: skip


async def idle(asked: Asked, root: Path) -> dict[str, Any]:
    """A relay with 2,000 idle or stuck connections."""
    async with swarm(root, 100, {"origin": 0.0, "relay0": 0.0}, asked.seed, ["relay0"]) as made:
        made.relays[0].start()
        await made.publish(1 << 20)
        await whole(made, ["relay0"])
        popen = made.relays[0].popen
        assert popen is not None
        return await crowded_relay(made.ports["relay0"], popen.pid, made.folder.chunks)


async def kills(asked: Asked, root: Path) -> dict[str, Any]:
    """SIGKILLs while three clients fetch again and again."""
    relays, names, rng = ["relay0", "relay1"], ["client0", "client1", "client2"], random.Random(asked.seed)
    completed = 0
    async with swarm(root, asked.size_mb, dict.fromkeys(["origin", *relays], asked.rate), asked.seed, relays) as made:
        assert made.origin is not None
        for process in made.relays:
            process.start()
        await listed(made.url, 2)
        await made.publish(asked.chunk_bytes)
        made.clients = [client(made, name, f"{name}-0") for name in names]
        for process in made.clients:
            process.start()
        victims, done = [made.origin, *made.relays, *made.clients], 0
        while done < asked.kills or any(p.popen is not None and p.popen.poll() is None for p in made.clients):
            await asyncio.sleep(rng.uniform(0.5, 1.5) * 3)
            for i, process in enumerate(made.clients):
                assert process.popen is not None
                if process.popen.poll() is not None and process in victims:
                    if process.popen.returncode:
                        raise RuntimeError(f"{process.name} failed: {process.log.read_text()[-2000:]}")
                    completed += 1
                    victims.remove(process)
                    if done < asked.kills:
                        made.clients[i] = client(made, names[i], f"{names[i]}-{completed}")
                        made.clients[i].start()
                        victims.append(made.clients[i])
            if done < asked.kills:
                victim = rng.choice(victims)
                victim.kill()
                victim.start()
                done += 1
        await ended([each for each in made.clients if each in victims])
        completed += sum(each in victims for each in made.clients)
        sent = made.egress(*HOST, *relays)
        stored = sum(path.stat().st_size for home in root.glob("client*-*") for path in home.rglob("*.safetensors"))
        stored += sum(path.stat().st_size for name in relays for path in (root / name).rglob("??/*"))
        again_mb = (sent - stored) / MB
        return {
            "kills": done,
            "completed": completed,
            "again": again_mb * MB / stored,
            "again_mb_a_kill": again_mb / done,
        }


async def with_shardcast(asked: Asked, root: Path) -> dict[str, Any]:
    """The same links with another package: the best of a few settings."""
    found = []
    for shard_mb, lanes in ((asked.size_mb / 20, 10), (asked.size_mb / 160, 10), (asked.size_mb / 160, 2)):
        settings, cpu = shardcast.Settings(max(0.25, shard_mb), lanes), psutil.cpu_times()
        folder = root / f"{shard_mb}-{lanes}"
        folder.mkdir()
        try:
            took = await shardcast.broadcast(
                asked.venv, folder, asked.size_mb, asked.rate, NUM_CLIENTS, NUM_RELAYS, asked.seed, settings
            )
        except (RuntimeError, TimeoutError) as error:
            found.append({"settings": str(settings), "failed": str(error)[-200:]})
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        bound = bound_s(asked.size_mb * MB, asked.rate, NUM_CLIENTS, NUM_RELAYS, False)
        ratio, share = took.took_s / bound, _cpu_share(cpu)
        found.append({"settings": str(settings), "ratio": ratio, **took._asdict(), "cpu": share})
    worked = [each for each in found if "ratio" in each]
    return {"best": min(worked, key=lambda each: each["ratio"], default=None), "all": found}


async def _said(path: Path) -> dict[str, Any]:
    while True:
        await asyncio.sleep(0.1)
        if path.exists() and path.stat().st_size:
            break
    said: dict[str, Any] = json.loads(path.read_text())
    return said


def _cpu_share(before: Any) -> float:
    """Share of all cores that was used since, by everything on this machine."""
    now = psutil.cpu_times()
    spent = [end - begin for begin, end in zip(before, now, strict=True)]
    return 1 - (now.idle - before.idle) / max(1e-9, sum(spent))


CASES: dict[str, Callable[[Asked, Path], Coroutine[Any, Any, dict[str, Any]]]] = {
    "plain": plain, "sharing": sharing, "bad": bad, "idle": idle, "kills": kills, "shardcast": with_shardcast,
}  # fmt: skip


def main() -> int:
    """Measure, print; 1 if a bar was missed."""
    parser = arguments(__doc__, "less of everything: 40 MB in chunks of 128 KiB at 8 Mb/s, 20 kills")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--mbit", type=float, default=0.0, help="uplinks, Mb/s (default: 200, quick: 8)")
    parser.add_argument(
        "--sharing-mbit", type=float, default=0.0, help="uplinks where clients share (default: 50, quick: 8)"
    )
    parser.add_argument("--size-mb", type=int, default=0, help="default: 1000, quick: 40")
    parser.add_argument("--kills", type=int, default=0, help="default: 200, quick: 20")
    parser.add_argument("--repeats", type=int, default=0, help="default: 3, quick: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--namespace", action="store_true", help="in a network namespace, where the kernel shapes the links (Linux)"
    )
    parser.add_argument("--shardcast", dest="venv", type=Path, default=None, help="a virtual environment that has it")
    asked = parser.parse_args(namespace=Asked())
    if asked.namespace:
        enter_namespace()
    asked.rate = (asked.mbit or (8 if asked.quick else 200)) * 1e6 / 8
    asked.sharing_rate = (asked.sharing_mbit or (8 if asked.quick else 50)) * 1e6 / 8
    asked.size_mb = asked.size_mb or (40 if asked.quick else 1000)
    asked.repeats = asked.repeats or (1 if asked.quick else 3)
    asked.kills = asked.kills or (20 if asked.quick else 200)
    asked.chunk_bytes = 1 << 20 if asked.size_mb >= 500 else 1 << 17
    figures: dict[str, Any] = {"uplink_mbit": asked.rate * 8e-6, "size_mb": asked.size_mb, "chunk_bytes": asked.chunk_bytes,
                               "cores": os.cpu_count(), "namespace": asked.namespace}  # fmt: skip
    for name in asked.only:
        if name == "shardcast" and asked.venv is None:
            continue
        runs = [_run(name, asked) for _ in range(asked.repeats if name in REPEATED else 1)]
        runs.sort(key=lambda run: run.get("ratio", 0.0))
        figures[name] = runs[(len(runs) - 1) // 2]
        if name in REPEATED:
            figures[name]["ratios"] = [run["ratio"] for run in runs]
    missed = [f"{name}.{what} = {figures[name][what]:.3g}, bar {bar:g}"
              for bars, sign in ((MOST, 1), (LEAST, -1)) for name in figures.keys() & bars.keys()
              for what, bar in bars[name].items() if sign * figures[name][what] > sign * bar]  # fmt: skip
    for line in sorted(missed):
        print(f"missed: {line}")
    report("broadcast", figures)
    return int(bool(missed))


def _run(name: str, asked: Asked) -> dict[str, Any]:
    """Measure one case once."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(CASES[name](asked, Path(folder)))
    print(f"{name:>10}  {_short(figures)}", flush=True)
    return figures


def _short(figures: dict[str, Any]) -> str:
    return "  ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}" for name, value in figures.items()
    )


if __name__ == "__main__":
    sys.exit(main())

"""CPU-seconds a version takes beside generating, scoring and training: saved, hashed, sent, loaded; by role.

    OMP_NUM_THREADS=1 python benchmarks/weights_cost.py [--versions 40] [--policy demo|large] [--tree PATH]

Four real processes on sockets: the coordinator, a trainer that saves its state and publishes, a worker and a validator that
load what is published, one version after another. The trainer's steps are noise on its masters: at learning rate 3e-4 in
float32 (`demo`, 0.8M parameters, as `whole_system.py` has), or at 1e-6 in bfloat16 (`large`, 27M). Each process counts its
own CPU, user and system, all threads, from version 2 on. `--tree` measures another checkout, such as the one before a
change. The coordinator's other work is left out: it is idle otherwise. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

POLICIES = {
    "demo": {"dtype": "float32", "lr": 3e-4, "tiny": {"max_positions": 128}},
    "large": {
        "dtype": "bfloat16", "lr": 1e-6,
        "tiny": {"width": 512, "layers": 8, "heads": 8, "kv_heads": 4, "mlp_width": 1536, "max_positions": 128},
    },
}  # fmt: skip
FIRST = 2
"""Versions before this one are not counted: connections open, and files are mapped for the first time."""


def main() -> None:
    """Start the four processes, let them go in step, and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--policy", choices=POLICIES, default="demo")
    parser.add_argument(
        "--anchor-every", type=int, default=1, help="versions between whole ones, as storage.anchor_every"
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--role", nargs=2, metavar=("ROLE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role:
        PLAYED[asked.role[0]](Path(asked.role[1]), asked)
        return
    with tempfile.TemporaryDirectory() as scratch:
        options = [
            "--versions",
            f"{asked.versions}",
            "--policy",
            asked.policy,
            "--anchor-every",
            f"{asked.anchor_every}",
        ]
        people = {
            role: subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *options, "--role", role, f"{scratch}/run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(asked.tree)},
            )
            for role in PLAYED
        }
        try:
            table = in_step(people, asked.versions)
        finally:
            for process in people.values():
                process.kill()
    counted = asked.versions - FIRST
    print(f"{'role':12} {'job':8} CPU-s a version")
    for (role, job), cpu_s in sorted(table.items()):
        print(f"{role:12} {job:8} {cpu_s / counted:.4f}")
    total = sum(table.values()) / counted
    by_job = {f"{role}.{job}": round(cpu_s / counted, 5) for (role, job), cpu_s in sorted(table.items())}
    figures = {
        "benchmark": "weights_cost",
        "policy": asked.policy,
        "anchor_every": asked.anchor_every,
        "versions": counted,
        "total_cpu_s": round(total, 5),
    }
    print(json.dumps(figures | by_job | {"load_after": round(os.getloadavg()[0], 2)}))


def in_step(people: "dict[str, subprocess.Popen[str]]", versions: int) -> Counter[tuple[str, str]]:
    """Each version is saved, published, and loaded by both nodes before the next."""
    table: Counter[tuple[str, str]] = Counter()
    tell(people["coordinator"], 0)
    for version in range(versions):
        for role in ("trainer", "worker", "validator", "coordinator"):
            for job, cpu_s in tell(people[role], version).items():
                if version >= FIRST:
                    table[role, job] += cpu_s
    return table


def tell(process: "subprocess.Popen[str]", version: int) -> dict[str, float]:
    """Let a process do its part for a version; returns its CPU-seconds by job."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{version}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process ended: see its traceback above")
    found: dict[str, float] = json.loads(line)
    return found


class Stopwatch:
    """CPU-seconds of this process by job, since the last report."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, job: str) -> Any:
        began = time.process_time()
        yield
        self._sums[job] = self._sums.get(job, 0.0) + time.process_time() - began

    def report(self) -> None:
        print(json.dumps(self._sums), flush=True)
        self._sums = {}


async def told() -> int:
    """The next version that the parent names."""
    return int(await asyncio.to_thread(sys.stdin.readline))


def config_of(asked: argparse.Namespace) -> Any:
    from shoal.config import RunConfig
    from shoal.tree import from_tree

    chosen = POLICIES[asked.policy]
    anchors = {"anchor_every": asked.anchor_every} if asked.anchor_every > 1 else {}
    tree = {
        "name": "cost", "steps": 1000, "seed": 0, "envs": [{"name": "arithmetic"}],
        "policy": {"dtype": chosen["dtype"], "tiny": chosen["tiny"]},
        "sampling": {"max_turn_tokens": 64, "max_tokens": 96},
        "rollouts": {"group_size": 8, "block_rollouts": 16, "batch_groups": 3, "max_staleness": 1, "lease_s": 60.0},
        "storage": {"window_steps": 4} | anchors,
    }  # fmt: skip
    return from_tree(tree, RunConfig, "benchmark")


def coordinate(root: Path, asked: argparse.Namespace) -> None:
    """The coordinator's application on a socket. Its batches are taken as formed, so that versions follow at once."""
    from shoal.folder import RunFolder
    from shoal.net.connections import Limits, http_server
    from shoal.roles.coordinator.api import application
    from shoal.roles.coordinator.role import _listen, open_run

    folder, config = RunFolder(root), config_of(asked)
    folder.prepare(config, root)
    desk = open_run(folder, folder.config())
    desk.state.main.batches.update(dict.fromkeys(range(asked.versions), ()))
    listener = _listen(folder, config)
    host, port = listener.getsockname()[:2]
    folder.address.write_text(json.dumps({"url": f"http://{host}:{port}", "port": port}))
    server = http_server(application(desk), Limits(total=100, trusted=()))

    async def story() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await told()
        before = time.process_time()
        print("{}", flush=True)
        while not serving.done():
            await told()
            now = time.process_time()
            print(json.dumps({"serve": now - before}), flush=True)
            before = now

    asyncio.run(story())


def opened(root: Path, key: str) -> tuple[Any, Any, Any]:
    """The run's folder, a client with a key, and that key, once the coordinator is there."""
    from shoal.folder import RunFolder
    from shoal.net.client import Client
    from shoal.net.keys import load_or_make_key

    folder = RunFolder(root)
    while not folder.address.exists():
        time.sleep(0.05)
    url, loaded = json.loads(folder.address.read_text())["url"], load_or_make_key(root / key)
    return folder, Client(url, loaded), loaded


def train(root: Path, asked: argparse.Namespace) -> None:
    """The trainer without its steps: noise moves the masters."""
    sys.stdin.readline()  # the coordinator is there
    import torch

    from shoal.policy.files import load_policy
    from shoal.protocol import types as t
    from shoal.roles.trainer.publishing import Publisher, start_policy
    from shoal.train.checkpoint import save_state
    from shoal.train.step import Learner

    torch.set_num_threads(1)
    folder, client, key = opened(root, "keys/trainer.key")
    config, watch = folder.config(), Stopwatch()
    learner = Learner(load_policy(start_policy(folder, config), torch.float32), config.train, temperature=1.0, steps=9)
    publisher = Publisher(folder, config, client, key, time.time)

    async def story() -> None:
        async with client:
            info = await client.get_json("/v1/run", t.RunInfo)
            client.run, client.head = info.run, info.head
            await client.post_json(
                "/v1/nodes", t.Join("trainer", "trainer", 0.0, "torch", "float32", "cpu"), t.NodeState
            )
            version = 0
            while True:
                with torch.no_grad():
                    for parameter in learner.model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=POLICIES[asked.policy]["lr"])  # type: ignore[arg-type]
                with watch.of("save"):
                    await asyncio.to_thread(save_state, folder.trainer, learner.state(version))
                with watch.of("publish"):
                    await publisher.publish(learner.model, version)
                watch.report()
                version = await told()

    asyncio.run(story())


def node(role: str, root: Path) -> None:
    """A worker or a validator that only loads."""
    sys.stdin.readline()
    from shoal.engine.local import LocalEngine
    from shoal.roles.seat import take_seat

    _, client, _ = opened(root, "keys/validator-0.key" if role == "validator" else "worker.key")
    watch = Stopwatch()

    async def story() -> None:
        async with client:
            seat = await take_seat(
                client,
                role,
                role,
                root / "nodes" / role,
                lambda dtype: LocalEngine(1, dtype),
                own_files=True,  # type: ignore[arg-type]
            )
            version = 0
            while True:
                with watch.of("fetch and load"):
                    await seat.load(version, keep=3)
                watch.report()
                version = await told()

    asyncio.run(story())


PLAYED = {
    "coordinator": coordinate,
    "trainer": train,
    "worker": lambda root, asked: node("worker", root),
    "validator": lambda root, asked: node("validator", root),
}

if __name__ == "__main__":
    main()

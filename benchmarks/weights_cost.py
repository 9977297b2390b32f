"""CPU-seconds a version takes beside generating, scoring and training: saved, hashed, sent, loaded; before and after.

    OMP_NUM_THREADS=1 python benchmarks/weights_cost.py [--versions 40] [--repeats 2] [--before COMMIT]

Four real processes on sockets: the coordinator, a trainer that saves its state and publishes, a worker and a validator that
load what is published, one version after another. The trainer's steps are noise on its masters: at learning rate 3e-4 in
float32 (`demo`, 0.8M parameters, as `whole_system.py` has), or at 1e-6 in bfloat16 (`large`, 27M). Each process counts its
own CPU, user and system, all threads, from version 2 on. The coordinator's other work is left out: it is idle otherwise.

*Before* is the last commit without relays and patches; runs of both trees alternate. The bar is half of it, all roles
together. The last line is JSON. The exit code is 1 if the bar is missed.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "018b0c0d23"
"""The last commit before clients fetched from several sources."""
BAR = 0.5

POLICIES = {
    "demo": {"dtype": "float32", "lr": 3e-4, "tiny": {"max_positions": 128}},
    "large": {
        "dtype": "bfloat16", "lr": 1e-6,
        "tiny": {"width": 512, "layers": 8, "heads": 8, "kv_heads": 4, "mlp_width": 1536, "max_positions": 128},
    },
}  # fmt: skip
FIRST = 2
"""Versions before this one are not counted: connections open, and files are mapped for the first time."""

JOBS = (
    ("trainer", "save"), ("trainer", "publish"), ("coordinator", "serve"), ("worker", "load"), ("validator", "load"),
)  # fmt: skip


def main() -> int:
    """Measure both trees, and print what each role took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--before", default=BEFORE, help="a commit, or nothing to measure this tree only")
    parser.add_argument(
        "--anchor-every", type=int, default=1, help="versions between whole ones, as storage.anchor_every"
    )
    parser.add_argument("--policy", choices=POLICIES, default="demo", help=argparse.SUPPRESS)
    parser.add_argument("--role", nargs=2, metavar=("ROLE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role:
        PLAYED[asked.role[0]](Path(asked.role[1]), asked)
        return 0
    figures: dict[str, Any] = {
        "benchmark": "weights_cost",
        "versions": asked.versions - FIRST,
        "repeats": asked.repeats,
    }
    figures["anchor_every"] = asked.anchor_every
    lines = ["| policy | role | job | before | after | ratio |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"before": checked_out(asked.before, Path(scratch))} if asked.before else {}
        trees["after"] = ROOT
        for policy in asked.policies:
            figures[policy] = compared(policy, trees, asked)
            lines += table(policy, figures[policy])
    print("\n".join(lines))
    missed = [policy for policy in asked.policies if figures[policy].get("ratio", 0.0) > BAR]
    for policy in asked.policies if asked.before else []:
        ratio = figures[policy]["ratio"]
        print(f"{policy}: ratio = {ratio:.3f}, bar at most {BAR}{'  MISSED' if policy in missed else ''}")
    print(json.dumps(figures | {"load_after": round(os.getloadavg()[0], 2), "tables": {"by_role": "\n".join(lines)}}))
    return 1 if missed else 0


def checked_out(commit: str, scratch: Path) -> Path:
    """The source of a commit, in a folder of its own."""
    packed = subprocess.run(["git", "archive", commit, "shoal"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(scratch / commit, filter="data")
    return scratch / commit


def compared(policy: str, trees: dict[str, Path], asked: argparse.Namespace) -> dict[str, Any]:
    """CPU-seconds a version by tree and job, medians over the repeats; and how many times those of before."""
    runs: dict[str, list[dict[str, float]]] = {when: [] for when in trees}
    for repeat in range(asked.repeats):
        for when, tree in trees.items():
            runs[when].append(measured(policy, tree, asked))
            total = runs[when][-1]["cpu_s.total"]
            print(f"{policy} {when} repeat={repeat} cpu_s={total:.4f}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {
        when: {name: round(statistics.median(run[name] for run in each), 5) for name in each[0]}
        for when, each in runs.items()
    }
    if "before" in trees:
        found["ratio"] = round(found["after"]["cpu_s.total"] / found["before"]["cpu_s.total"], 4)
    return found


def table(policy: str, found: dict[str, Any]) -> list[str]:
    """Rows of Markdown."""
    rows = []
    for role, job in (*JOBS, ("all", "")):
        name = f"cpu_s.{role}.{job}" if job else "cpu_s.total"
        before, after = found.get("before", {}).get(name), found["after"][name]
        compared = (f"{before:.4f}", f"{after:.4f}", f"{after / before:.2f}") if before else ("", f"{after:.4f}", "")
        rows.append("| " + " | ".join((policy, role, job, *compared)) + " |")
    return rows


def measured(policy: str, tree: Path, asked: argparse.Namespace) -> dict[str, float]:
    """CPU-seconds a version of each job, and of all."""
    with tempfile.TemporaryDirectory() as scratch:
        anchor_every = asked.anchor_every if tree == ROOT else 1  # before, each version was whole
        options = ["--versions", f"{asked.versions}", "--anchor-every", f"{anchor_every}", "--policy", policy]
        people = {
            role: subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *options, "--role", role, f"{scratch}/run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(tree)},
            )
            for role in PLAYED
        }
        try:
            jobs = in_step(people, asked.versions)
        finally:
            for process in people.values():
                process.kill()
                process.wait()
    counted = asked.versions - FIRST
    return {f"cpu_s.{role}.{job}": jobs[role, job] / counted for role, job in JOBS} | {
        "cpu_s.total": sum(jobs.values()) / counted
    }


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
    from shoal.net.connection_limits import ServerLimits, http_server
    from shoal.roles.coordinator.calls import application
    from shoal.roles.coordinator.main import open_run
    from shoal.run_folder import RunFolder

    folder, config = RunFolder(root), config_of(asked)
    folder.prepare(config, root)
    desk = open_run(folder, folder.config())
    desk.state.main.batches.update(dict.fromkeys(range(asked.versions), ()))
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()[:2]
    folder.address.write_text(json.dumps({"url": f"http://{host}:{port}", "port": port}))
    server = http_server(application(desk), ServerLimits(total=100, trusted=()))

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
    from shoal.net.client import Client
    from shoal.net.key_files import load_or_make_key
    from shoal.run_folder import RunFolder

    folder = RunFolder(root)
    while not folder.address.exists():
        time.sleep(0.05)
    url, loaded = json.loads(folder.address.read_text())["url"], load_or_make_key(root / key)
    return folder, Client(url, loaded), loaded


def train(root: Path, asked: argparse.Namespace) -> None:
    """The trainer without its steps: noise moves the masters."""
    sys.stdin.readline()  # the coordinator is there
    import torch

    from shoal.models.checkpoint import load_policy
    from shoal.protocol import messages as t
    from shoal.roles.trainer import publish
    from shoal.roles.trainer.publish import Publisher
    from shoal.train.checkpoint import save_state
    from shoal.train.learner import Learner

    try:
        from shoal.roles.trainer.models import start_policy
    except ImportError:  # before, it was beside the publisher
        start_policy = publish.start_policy

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
                    copied = hasattr(publisher, "snapshot")  # before, the next step waited
                    await publisher.publish(publisher.snapshot(learner.model) if copied else learner.model, version)
                watch.report()
                version = await told()

    asyncio.run(story())


def node(role: str, root: Path) -> None:
    """A worker or a validator that only loads."""
    sys.stdin.readline()
    from shoal.engine.native import LocalEngine
    from shoal.roles.node.session import take_seat

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
                with watch.of("load"):
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
    sys.exit(main())

"""A small real run whose links and speeds are fixed, and what it showed.

Used by `planning.py`, which compares runs with what is predicted of them. Coordinator, trainer, validator, workers and
relays are the project's own, over HTTP on loopback. Links are shaped by `tests/net/fault_proxy`: one proxy is the host's
uplink, one for each worker its downlink, one for each relay its uplink. Generation and training are slowed down to fixed
speeds, so that the figures do not depend on what else this machine does.
"""

import asyncio
import contextlib
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

from shoal.config import RunConfig
from shoal.config.role_options import NodeOptions
from shoal.engine.interface import Continuation, EngineRequest
from shoal.engine.native import LocalEngine
from shoal.ledger.batches import BatchFormed, GroupAccepted
from shoal.ledger.event_types import read_entry
from shoal.ledger.versions import CheckpointPublished
from shoal.net.client import Client
from shoal.net.connection_limits import ServerLimits, http_server
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.constants import MAX_CHUNK_BYTES
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.main import _ticking, open_run
from shoal.roles.coordinator.routes import application
from shoal.roles.node.lifecycle import Node
from shoal.roles.relay import relay as relay
from shoal.roles.trainer import Trainer
from shoal.roles.validator import Validator
from shoal.roles.worker.remote_env import EngineTurn
from shoal.roles.worker.worker import Worker
from shoal.run_folder import RunFolder
from shoal.step_metrics import read_metrics
from shoal.typed_toml import from_tree
from shoal.weights import publish
from tests.net.fault_proxy import FaultProxy

WARMUP_STEPS = 4
"""Of each run. They are not measured."""

RUN: dict[str, Any] = {
    "name": "planning", "envs": [{"name": "arithmetic", "args": {"digits": 2, "operations": "+"}}],
    "sampling": {"max_turn_tokens": 5, "max_tokens": 24},
    "rollouts": {"group_size": 8, "block_rollouts": 16, "batch_groups": 12, "max_flat_groups": 0},
    "policy": {"path": str(Path(__file__).resolve().parent.parent / "recipes" / "arithmetic-start")},
    "train": {"lr": 1e-5}, "eval": {"episodes": 0},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Machines and links. Rates are bytes per second; 0 is no limit."""

    name: str
    downs: tuple[float, ...]
    origin_up: float = 0.0
    staleness: int = 1
    train_s: float = 1.5
    tokens_per_s: tuple[float, ...] = (120.0, 120.0, 120.0)
    relays_up: tuple[float, ...] = ()
    chunk_bytes: int = MAX_CHUNK_BYTES


@dataclass(frozen=True)
class Seen:
    """What a run showed after its warm-up. Times are seconds."""

    step_s: float
    idle_share: float
    staleness: float
    lag_s: float
    origin_bytes: float
    # for the simulator
    rollout_tokens: float
    signal_share: float
    save_s: float
    publish_s: float
    load_s: float
    check_s: float
    full_bytes: float


class PacedEngine(LocalEngine):
    """Generates no faster than a fixed speed."""

    pace = 0.0

    def extend(self, requests: Sequence[EngineRequest], temperature: float) -> list[Continuation]:
        began = time.monotonic()
        made = super().extend(requests, temperature)
        tokens = sum(len(continuation.token_ids) for continuation in made)
        time.sleep(max(0.0, began + tokens / self.pace - time.monotonic()))
        return made


class TimedWorker(Worker):
    """Notes when it has each version."""

    loads: list[tuple[int, float, float]]
    """Version, when it was there, and how long that took."""

    async def _load_for(self, grant: t.Grant, use: EngineTurn | None = None) -> None:
        before, began = self.session.engine.version, time.time()
        await super()._load_for(grant, use)
        if self.session.engine.version != before:
            self.loads.append((grant.lease.version, time.time(), time.time() - began))


class TimedValidator(Validator):
    """Notes how long it takes for a block, from the body until the verdict is taken."""

    took: list[float]

    async def _body(self, check: t.Check) -> bytes:
        self.began, self.blocks = time.monotonic(), len(check.lease.blocks)
        return await super()._body(check)

    async def _give(self, verdict: t.Verdict) -> None:
        await super()._give(verdict)
        self.took.append((time.monotonic() - self.began) / self.blocks)


def config_of(case: Case, steps: int, seed: int) -> RunConfig:
    tree = {**RUN, "steps": WARMUP_STEPS + steps + case.staleness + 2, "seed": seed + 1}
    tree["rollouts"] = {**RUN["rollouts"], "max_staleness": case.staleness}
    return from_tree(tree, RunConfig, "benchmark")


async def measured(case: Case, steps: int, seed: int) -> Seen:
    """A real run of one case."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        folder.prepare(config_of(case, steps, seed), Path(scratch))
        coordinator = open_run(folder, folder.config())
        async with serving(coordinator) as port, contextlib.AsyncExitStack() as lines:
            lines.enter_context(cut_into(case.chunk_bytes))
            rng = random.Random(seed)
            origin = await lines.enter_async_context(FaultProxy(port, rng, bytes_per_s=case.origin_up))
            downs = [
                await lines.enter_async_context(FaultProxy(origin.port, rng, bytes_per_s=down)) for down in case.downs
            ]
            for index, up in enumerate(case.relays_up):
                await lines.enter_async_context(relaying(Path(scratch) / f"relay-{index}", origin.port, rng, up))
            while len(coordinator.relays.told()) < len(case.relays_up):  # noqa: ASYNC110 - workers ask once a minute
                await asyncio.sleep(0.05)
            workers = [worker_of(folder, i, line.port, case.tokens_per_s[i]) for i, line in enumerate(downs)]
            trainer, validator = trainer_of(folder, port, case.train_s), validator_of(folder, port)
            roles = [asyncio.create_task(role.run()) for role in (trainer, validator, *workers)]
            sent = {}
            first, last = WARMUP_STEPS, WARMUP_STEPS + steps
            while coordinator.state.main.version < last:
                await asyncio.sleep(0.02)
                for task in roles:
                    if task.done():
                        task.result()
                for version in (first, last):
                    if coordinator.state.main.version >= version:
                        sent.setdefault(version, origin.passed_bytes)
            for task in roles:
                task.cancel()
            await asyncio.gather(*roles, return_exceptions=True)
        loads = [load for worker in workers for load in worker.loads]
        checks = median(validator.took)
        return figures(folder, coordinator, loads, checks, (sent[last] - sent[first]) / steps, first, last)


@contextlib.asynccontextmanager
async def serving(coordinator: Coordinator) -> AsyncIterator[int]:
    """The port of the coordinator, while it serves."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = http_server(
        application(coordinator, lifespan=_ticking(coordinator)), ServerLimits(total=256, trusted=("127.0.0.1",))
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@contextlib.contextmanager
def cut_into(chunk_bytes: int) -> Iterator[None]:
    """Cut versions into chunks of this size, though they are small."""
    with mock.patch.multiple(publish, BIG_BYTES=0, SMALLEST_CHUNK_BYTES=chunk_bytes):
        yield


@contextlib.asynccontextmanager
async def relaying(home: Path, port: int, rng: random.Random, bytes_per_s: float) -> AsyncIterator[None]:
    """A relay that fetches through a port of this machine, and serves behind an uplink."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    async with FaultProxy(own, rng, bytes_per_s=bytes_per_s) as line:
        key, url = load_or_make_key(home / "node.key"), f"http://127.0.0.1:{line.port}"
        task = asyncio.create_task(relay._run(f"http://127.0.0.1:{port}", key, home, "127.0.0.1", own, url, 1000))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def client_of(key_file: Path, port: int) -> Client:
    return Client(f"http://127.0.0.1:{port}", load_or_make_key(key_file))


def node_of(home: Path, client: Client, make_engine: Callable[[str], LocalEngine]) -> Node:
    """A node of the run's host, which does not read its disk."""
    assert client.key is not None
    options = NodeOptions(url=client.base_url, home=str(home), run_dir=str(home.parent.parent), name=home.name)
    return Node(client, client.key.public, options, make_engine)


def worker_of(folder: RunFolder, index: int, port: int, tokens_per_s: float) -> TimedWorker:
    home = folder.root.parent / "elsewhere" / "nodes" / f"worker-{index}"  # the host's own nodes read its disk

    def make_engine(dtype: str) -> LocalEngine:
        engine = PacedEngine(threads=1, dtype=dtype)
        engine.pace = tokens_per_s
        return engine

    worker = TimedWorker(node_of(home, client_of(home / "node.key", port), make_engine))
    worker.loads = []
    return worker


def validator_of(folder: RunFolder, port: int) -> TimedValidator:
    client = client_of(folder.keys / "validator-0.key", port)
    home = folder.nodes / "validator-0"
    validator = TimedValidator(node_of(home, client, lambda dtype: LocalEngine(1, dtype)))
    validator.took = []
    return validator


def trainer_of(folder: RunFolder, port: int, train_s: float) -> Trainer:
    path = folder.keys / "trainer.key"
    trainer = Trainer(folder, folder.config(), client_of(path, port), load_or_make_key(path))
    quick = trainer.learner.step

    def paced(*args: Any) -> dict[str, Any]:
        began = time.monotonic()
        made = quick(*args)
        time.sleep(max(0.0, began + train_s - time.monotonic()))
        return made

    trainer.learner.step = paced  # type: ignore[method-assign]
    return trainer


def figures(
    folder: RunFolder, coordinator: Coordinator, loads: list[tuple[int, float, float]], check_s: float, sent: float,
    first: int,
    last: int,
) -> Seen:  # fmt: skip
    """What the log, the metrics and the workers' notes say of the steps from `first` on."""
    entries = [read_entry(data)[0] for data, _ in coordinator.log_writer.store.read()]
    published = {e.body.version: e.time for e in reversed(entries) if isinstance(e.body, CheckpointPublished)}
    groups = [e.body for e in entries if isinstance(e.body, GroupAccepted)]
    taken = [e.body for e in entries if isinstance(e.body, BatchFormed) and first <= e.body.step < last]
    between = [batch.step - version for batch in taken for version, _ in batch.groups]
    steps = [line for line in read_metrics(folder.metrics) if first <= line["step"] < last]
    lags = [at - published[version] for version, at, _ in loads if first <= version < last]
    rollouts = len(groups) * coordinator.state.rules.group_size
    return Seen(
        step_s=(published[last] - published[first]) / (last - first),
        idle_share=sum(s["waiting_share"] * s["step_s"] for s in steps) / sum(s["step_s"] for s in steps),
        staleness=mean(between),
        lag_s=mean(lags),
        origin_bytes=sent,
        rollout_tokens=sum(group.tokens for group in groups) / rollouts,
        signal_share=sum(group.signal is not False for group in groups) / len(groups),
        save_s=mean(s["save_s"] for s in steps),
        publish_s=mean(s["publish_s"] for s in steps),
        load_s=median(took for _, _, took in loads),
        check_s=check_s,
        full_bytes=sum(
            file.size for file in coordinator.kept.manifests[last].files if file.path.endswith(".safetensors")
        ),
    )

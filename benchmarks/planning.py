"""What `shoal plan` predicts beside what small real runs do: steps, bytes, lags, staleness and the trainer's waits.

    python benchmarks/planning.py [--repeats 3] [--steps 8] [--case NAME]

Each case is a real run with the project's own coordinator, trainer, validator and workers over HTTP on loopback. Links are
shaped by `net/fault_proxy`: one proxy is the host's uplink, and one for each worker its downlink. Generation and training
are slowed down to fixed speeds, so that the figures do not depend on what else this machine does. What the simulator must
be told (how long publishing, loading, checking and requests take) is measured in the case `open`, without limits;
the other cases are predicted with it. Repeats have other seeds. The last line is JSON: for each case the measured median
and spread, the prediction and its error: relative, but for shares and staleness the difference.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from shoal.config import RunConfig
from shoal.engine.base import Continuation, Request
from shoal.engine.local import LocalEngine
from shoal.folder import RunFolder
from shoal.ledger.facts.batches import BatchFormed, GroupAccepted
from shoal.ledger.facts.versions import CheckpointPublished
from shoal.ledger.table import read_entry
from shoal.metrics import read_metrics
from shoal.net.client import Client
from shoal.net.connections import Limits, http_server
from shoal.net.fault_proxy import FaultProxy
from shoal.net.keys import load_or_make_key
from shoal.plan.setting import Node, Setting
from shoal.plan.simulate import simulate
from shoal.protocol import types as t
from shoal.roles.coordinator.api import application
from shoal.roles.coordinator.desk import Desk
from shoal.roles.coordinator.role import _ticking, open_run, rules_of
from shoal.roles.trainer import Trainer
from shoal.roles.validator import Validator
from shoal.roles.worker import Worker
from shoal.tree import from_tree

WARMUP_STEPS = 4
SEEDS = 8
"""Simulations of each measured run: their mean is the prediction."""
REQUESTS_S = (0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3)
"""What a request may take with all that a role does around it; the one that explains the open case best is told."""
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
    step_s: float = 1.5
    tokens_per_s: tuple[float, ...] = (120.0, 120.0, 120.0)


CASES = (
    Case("open", (0.0, 0.0, 0.0)),
    Case("uplink", (0.0, 0.0, 0.0), origin_up=0.6e6),
    Case("downlinks", (0.4e6, 0.4e6, 0.2e6)),
    Case("mixed", (0.3e6, 0.0, 0.0), origin_up=0.9e6, tokens_per_s=(60.0, 120.0, 180.0), step_s=3.0),
    Case("synchronous", (0.0, 0.0, 0.0), origin_up=0.6e6, staleness=0),
)


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
    publish_s: float
    load_s: float
    check_s: float
    full_bytes: float


class PacedEngine(LocalEngine):
    """Generates no faster than a fixed speed."""

    pace = 0.0

    def extend(self, requests: Sequence[Request], temperature: float) -> list[Continuation]:
        began = time.monotonic()
        made = super().extend(requests, temperature)
        tokens = sum(len(continuation.token_ids) for continuation in made)
        time.sleep(max(0.0, began + tokens / self.pace - time.monotonic()))
        return made


class TimedWorker(Worker):
    """Notes when it has each version."""

    loads: list[tuple[int, float, float]]
    """Version, when it was there, and how long that took."""

    async def _load_for(self, grant: t.Grant) -> None:
        before, began = self.seat.engine.version, time.time()
        await super()._load_for(grant)
        if self.seat.engine.version != before:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps measured, after the warm-up")
    parser.add_argument("--case", action="append", default=[], help="only these; `open` is always there")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    cases = [case for case in CASES if not options.case or case.name in ("open", *options.case)]
    seen: dict[str, list[Seen]] = defaultdict(list)
    for repeat in range(options.repeats):
        for case in cases:
            seen[case.name].append(asyncio.run(measured(case, options.steps, repeat)))
            last = seen[case.name][-1]
            print(f"{case.name:12} {last.step_s:6.2f} s/step, idle {last.idle_share:4.0%}, lag {last.lag_s:5.2f} s, "
                  f"staleness {last.staleness:.2f}, {last.origin_bytes / 1e6:.2f} MB/step", flush=True)  # fmt: skip
    print(json.dumps(compared(cases, seen, options.steps)))


def config_of(case: Case, steps: int, seed: int) -> RunConfig:
    tree = {**RUN, "steps": WARMUP_STEPS + steps + case.staleness + 2, "seed": seed + 1}
    tree["rollouts"] = {**RUN["rollouts"], "max_staleness": case.staleness}
    return from_tree(tree, RunConfig, "benchmark")


async def measured(case: Case, steps: int, seed: int) -> Seen:
    """A real run of one case."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "run")
        folder.prepare(config_of(case, steps, seed), Path(scratch))
        desk = open_run(folder, folder.config())
        async with serving(desk) as port, contextlib.AsyncExitStack() as lines:
            rng = random.Random(seed)
            origin = await lines.enter_async_context(FaultProxy(port, rng, bytes_per_s=case.origin_up))
            downs = [
                await lines.enter_async_context(FaultProxy(origin.port, rng, bytes_per_s=down)) for down in case.downs
            ]
            workers = [worker_of(folder, i, line.port, case.tokens_per_s[i]) for i, line in enumerate(downs)]
            trainer, validator = trainer_of(folder, port, case.step_s), validator_of(folder, port)
            roles = [asyncio.create_task(role.run()) for role in (trainer, validator, *workers)]
            sent = {}
            first, last = WARMUP_STEPS, WARMUP_STEPS + steps
            while desk.state.main.version < last:
                await asyncio.sleep(0.02)
                for task in roles:
                    if task.done():
                        task.result()
                for version in (first, last):
                    if desk.state.main.version >= version:
                        sent.setdefault(version, origin.passed_bytes)
            for task in roles:
                task.cancel()
            await asyncio.gather(*roles, return_exceptions=True)
        loads = [load for worker in workers for load in worker.loads]
        checks = median(validator.took)
        return figures(folder, desk, loads, checks, (sent[last] - sent[first]) / steps, first, last)


@contextlib.asynccontextmanager
async def serving(desk: Desk) -> AsyncIterator[int]:
    """The port of the coordinator, while it serves."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = http_server(application(desk, lifespan=_ticking(desk)), Limits(total=256, trusted=("127.0.0.1",)))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


def client_of(key_file: Path, port: int) -> Client:
    return Client(f"http://127.0.0.1:{port}", load_or_make_key(key_file))


def worker_of(folder: RunFolder, index: int, port: int, tokens_per_s: float) -> TimedWorker:
    home = folder.root.parent / "elsewhere" / "nodes" / f"worker-{index}"  # the host's own nodes read its disk

    def make_engine(dtype: str) -> LocalEngine:
        engine = PacedEngine(threads=1, dtype=dtype)
        engine.pace = tokens_per_s
        return engine

    client, key = client_of(home / "node.key", port), load_or_make_key(home / "node.key")
    worker = TimedWorker(client, key.public, home, make_engine, 0, f"worker-{index}", own_files=True)
    worker.loads = []
    return worker


def validator_of(folder: RunFolder, port: int) -> TimedValidator:
    client = client_of(folder.keys / "validator-0.key", port)
    home = folder.nodes / "validator-0"
    validator = TimedValidator(client, home, lambda dtype: LocalEngine(1, dtype), own_files=True)
    validator.took = []
    return validator


def trainer_of(folder: RunFolder, port: int, step_s: float) -> Trainer:
    path = folder.keys / "trainer.key"
    trainer = Trainer(folder, folder.config(), client_of(path, port), load_or_make_key(path))
    quick = trainer.learner.step

    def paced(*args: Any) -> dict[str, Any]:
        began = time.monotonic()
        made = quick(*args)
        time.sleep(max(0.0, began + step_s - time.monotonic()))
        return made

    trainer.learner.step = paced  # type: ignore[method-assign]
    return trainer


def figures(
    folder: RunFolder, desk: Desk, loads: list[tuple[int, float, float]], check_s: float, sent: float, first: int, last: int
) -> Seen:  # fmt: skip
    """What the log, the metrics and the workers' notes say of the steps from `first` on."""
    entries = [read_entry(data)[0] for data, _ in desk.book.store.read()]
    published = {e.body.version: e.time for e in reversed(entries) if isinstance(e.body, CheckpointPublished)}
    groups = [e.body for e in entries if isinstance(e.body, GroupAccepted)]
    taken = [e.body for e in entries if isinstance(e.body, BatchFormed) and first <= e.body.step < last]
    between = [batch.step - version for batch in taken for version, _ in batch.groups]
    steps = [line for line in read_metrics(folder.metrics) if first <= line["step"] < last]
    lags = [at - published[version] for version, at, _ in loads if first <= version < last]
    rollouts = len(groups) * desk.state.rules.group_size
    return Seen(
        step_s=(published[last] - published[first]) / (last - first),
        idle_share=sum(s["waiting_share"] * s["step_s"] for s in steps) / sum(s["step_s"] for s in steps),
        staleness=mean(between),
        lag_s=mean(lags),
        origin_bytes=sent,
        rollout_tokens=sum(group.tokens for group in groups) / rollouts,
        signal_share=sum(group.signal is not False for group in groups) / len(groups),
        publish_s=mean(s["publish_s"] + s["save_s"] for s in steps),
        load_s=median(took for _, _, took in loads),
        check_s=check_s,
        full_bytes=sum(file.size for file in desk.kept.manifests[last].files if file.path.endswith(".safetensors")),
    )


def request_s(base: Seen, steps: int) -> float:
    """What a request takes on this machine, so that steps of the open case take as long as they did."""

    def error(request_s: float) -> float:
        told = [simulate(setting_of(CASES[0], base, base, steps, seed, request_s)) for seed in range(SEEDS)]
        return abs(mean(one.step_s for one in told) - base.step_s)

    return min(REQUESTS_S, key=error)


def setting_of(case: Case, base: Seen, own: Seen, steps: int, seed: int, request_s: float) -> Setting:
    """What the simulator is told: times from the open case of the same repeat, because they depend on what else this
    machine does; tokens and signal of the case itself, which follow from what its policy learns."""
    nodes = tuple(
        Node(speed, down, 0.0, base.load_s) for speed, down in zip(case.tokens_per_s, case.downs, strict=True)
    )  # fmt: skip
    return Setting(
        rules=rules_of(config_of(case, steps, 0)), workers=nodes,
        rollout_tokens=own.rollout_tokens, step_s=case.step_s, publish_s=base.publish_s, check_s=base.check_s,
        full_bytes=base.full_bytes, origin_up=case.origin_up, request_s=request_s, signal_share=own.signal_share,
        warmup_steps=WARMUP_STEPS, measured_steps=steps, seed=seed,
    )  # fmt: skip


def compared(cases: Iterable[Case], seen: dict[str, list[Seen]], steps: int) -> dict[str, Any]:
    """Measured and predicted, by case and figure."""
    found: dict[str, Any] = {"benchmark": "planning", "load": round(os.getloadavg()[0], 2)}
    errors = []
    requests_s = [request_s(base, steps) for base in seen["open"]]
    for case in cases:
        told = [
            [simulate(setting_of(case, base, own, steps, seed, took_s)) for seed in range(SEEDS)]
            for base, own, took_s in zip(seen["open"], seen[case.name], requests_s, strict=True)
        ]
        for name, relative in (
            ("step_s", True), ("lag_s", True), ("origin_bytes", True), ("idle_share", False), ("staleness", False),
        ):  # fmt: skip
            values = sorted(getattr(one, name) for one in seen[case.name])
            middle, said = median(values), median(mean(getattr(one, name) for one in ones) for ones in told)
            error = abs(said - middle) / middle if relative else abs(said - middle)
            found[f"{case.name}.{name}"] = {
                "measured": round(middle, 3), "low": round(values[0], 3), "high": round(values[-1], 3),
                "predicted": round(said, 3), "error": round(error, 3),
            }  # fmt: skip
            if case.name != "open":
                errors.append(error)
            print(f"{case.name:12} {name:13} measured {middle:12.3f} ({values[0]:.3f} to {values[-1]:.3f})  predicted "
                  f"{said:12.3f}  error {error:.1%}")  # fmt: skip
    found["largest_error"] = round(max(errors, default=0.0), 3)
    return found


if __name__ == "__main__":
    main()

"""What `shoal plan` predicts beside what small real runs do: steps, bytes, lags, staleness and the trainer's waits.

    python benchmarks/planning.py [--repeats 3] [--steps 8] [--case NAME]

Each case is a real run with the project's own coordinator, trainer, validator, workers and relays over HTTP on loopback.
Links are shaped by `net/fault_proxy`: one proxy is the host's uplink, one for each worker its downlink, one for each relay
its uplink. Generation and training are slowed down to fixed speeds, so that the figures do not depend on what else this
machine does. What the simulator must be told (how long saving, publishing, loading, checking and requests take) is measured
in the case `open`, without limits; the other cases are predicted with it. Repeats have other seeds. In `relays`, a version
is cut into many chunks, as a large one is. The last line is JSON: for each case the measured median and spread, and the
prediction; the errors, relative, or for a share the difference; and a table of both.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a file, as benchmarks are

from benchmarks.pages.markdown import percent, table
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
from shoal.plan.setting import Setting, WorkerMachine
from shoal.plan.simulate import simulate
from shoal.protocol import types as t
from shoal.protocol.constants import MAX_CHUNK_BYTES
from shoal.roles.coordinator.api import application
from shoal.roles.coordinator.desk import Desk
from shoal.roles.coordinator.role import _ticking, open_run, rules_of
from shoal.roles.relay import role as relay
from shoal.roles.trainer import Trainer
from shoal.roles.validator import Validator
from shoal.roles.worker import Worker
from shoal.tree import from_tree
from shoal.weights import publish

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
    train_s: float = 1.5
    tokens_per_s: tuple[float, ...] = (120.0, 120.0, 120.0)
    relays_up: tuple[float, ...] = ()
    chunk_bytes: int = MAX_CHUNK_BYTES


CASES = (
    Case("open", (0.0, 0.0, 0.0)),
    Case("uplink", (0.0, 0.0, 0.0), origin_up=0.6e6),
    Case("downlinks", (0.4e6, 0.4e6, 0.2e6)),
    Case("mixed", (0.3e6, 0.0, 0.0), origin_up=0.9e6, tokens_per_s=(60.0, 120.0, 180.0), train_s=3.0),
    Case("synchronous", (0.0, 0.0, 0.0), origin_up=0.6e6, staleness=0),
    Case("relays", (0.0, 0.0, 0.0), origin_up=0.8e6, relays_up=(0.8e6, 0.8e6), chunk_bytes=32 << 10),
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
    save_s: float
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
            lines.enter_context(cut_into(case.chunk_bytes))
            rng = random.Random(seed)
            origin = await lines.enter_async_context(FaultProxy(port, rng, bytes_per_s=case.origin_up))
            downs = [
                await lines.enter_async_context(FaultProxy(origin.port, rng, bytes_per_s=down)) for down in case.downs
            ]
            for index, up in enumerate(case.relays_up):
                await lines.enter_async_context(relaying(Path(scratch) / f"relay-{index}", origin.port, rng, up))
            while len(desk.relays.told()) < len(case.relays_up):  # noqa: ASYNC110 - workers ask once a minute
                await asyncio.sleep(0.05)
            workers = [worker_of(folder, i, line.port, case.tokens_per_s[i]) for i, line in enumerate(downs)]
            trainer, validator = trainer_of(folder, port, case.train_s), validator_of(folder, port)
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
        save_s=mean(s["save_s"] for s in steps),
        publish_s=mean(s["publish_s"] for s in steps),
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
    machines = tuple(
        WorkerMachine(speed, down, 0.0, base.load_s) for speed, down in zip(case.tokens_per_s, case.downs, strict=True)
    )  # fmt: skip
    return Setting(
        rules=rules_of(config_of(case, steps, 0)), workers=machines,
        rollout_tokens=own.rollout_tokens, train_s=case.train_s + base.save_s, publish_s=base.publish_s,
        check_s=base.check_s, full_bytes=base.full_bytes, origin_up=case.origin_up, relays_up=case.relays_up,
        chunk_bytes=case.chunk_bytes, request_s=request_s, signal_share=own.signal_share,
        warmup_steps=WARMUP_STEPS, measured_steps=steps, seed=seed,
    )  # fmt: skip


FIGURES = {
    "step_s": "seconds a step", "lag_s": "seconds until a worker has a version", "origin_bytes": "MB from the host a step",
    "idle_share": "trainer waits", "staleness": "staleness, versions",
}  # fmt: skip
"""What is compared, with its words in the table."""


def compared(cases: Iterable[Case], seen: dict[str, list[Seen]], steps: int) -> dict[str, Any]:
    """Measured and predicted, by case and figure."""
    found: dict[str, Any] = {"benchmark": "planning", "load": round(os.getloadavg()[0], 2)}
    errors: dict[str, dict[str, float]] = {}
    rows = []
    requests_s = [request_s(base, steps) for base in seen["open"]]
    for case in cases:
        told = [
            [simulate(setting_of(case, base, own, steps, seed, took_s)) for seed in range(SEEDS)]
            for base, own, took_s in zip(seen["open"], seen[case.name], requests_s, strict=True)
        ]
        of_case = errors[case.name] = {}
        for name in FIGURES:
            values = sorted(getattr(one, name) for one in seen[case.name])
            middle, said = median(values), median(mean(getattr(one, name) for one in ones) for ones in told)
            relative = name not in ("idle_share", "staleness")
            of_case[name] = round(abs(said - middle) / (middle if relative else 1.0), 3)
            found[f"{case.name}.{name}"] = {
                "measured": round(middle, 3), "low": round(values[0], 3), "high": round(values[-1], 3),
                "predicted": round(said, 3),
            }  # fmt: skip
            rows.append(row(case.name, name, values, middle, said))
            print(f"{case.name:12} {name:13} measured {middle:12.3f} ({values[0]:.3f} to {values[-1]:.3f})  predicted "
                  f"{said:12.3f}  error {of_case[name]:.3f}")  # fmt: skip
    found["error_share"] = {
        name: {figure: error for figure, error in of.items() if figure != "staleness"} for name, of in errors.items()
    }
    found["largest_error_share"] = max(
        (max(of.values()) for name, of in found["error_share"].items() if name != "open"), default=0.0
    )
    found["largest_error_versions"] = max((of["staleness"] for of in errors.values()), default=0.0)
    headings = ("case", "figure", "measured, median", "lowest to highest", "predicted")
    found["tables"] = {"cases": table(headings, rows, right=(2, 3, 4))}
    return found


def row(case: str, name: str, values: Sequence[float], middle: float, said: float) -> tuple[str, ...]:
    """A row of the table."""

    def text(value: float) -> str:
        return percent(value, 0) if name == "idle_share" else f"{value / (1e6 if name == 'origin_bytes' else 1):.2f}"

    return case, FIGURES[name], text(middle), f"{text(values[0])} to {text(values[-1])}", text(said)


if __name__ == "__main__":
    main()

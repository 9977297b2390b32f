"""What a crowd that waits costs a coordinator: submissions and verdicts a second, with and without it.

    python benchmarks/crowd.py [--workers 1000] [--seconds 20] [--quick]

The real coordinator application in one process with its callers and without sockets: signed requests, the gate, the
rules, the log and the blobs on disk are the product's. Workers ask for a lease, take `WORK_S` to fill it and send it;
three validators judge and one trainer publishes as fast as they are served, without a model. The run is measured
with half as many workers as are asked for and room for all of them, and with all of them and room for half: the others
wait in their polls for a lease. No peer publishes such a figure, so none runs beside us. Ends with one JSON line.
"""

import asyncio
import os
import random
import secrets
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from benchmarks.measure import arguments, report
from shoal.algos.activation_projection import VALUES
from shoal.config import RunConfig
from shoal.net.key_files import load_or_make_key
from shoal.protocol import messages as t
from shoal.protocol.algorithm_config import Grpo
from shoal.protocol.audit_and_pay import influence, must_audit
from shoal.protocol.encoding import digest, from_json, to_json, to_msgpack
from shoal.protocol.signing import Key, RequestLine, SenderState, sign_request
from shoal.roles.coordinator.coordinator import Coordinator
from shoal.roles.coordinator.main import TICK_S, open_run
from shoal.roles.coordinator.routes import application
from shoal.run_folder import RunFolder
from shoal.typed_toml import from_tree
from shoal.weights.manifest import POLICY_STREAM, sign_manifest

WORK_S = 4.0
"""A lease takes a worker this long: 500 at work offer 125 submissions a second."""

GROUP_SIZE, ROLLOUT_BYTES = 8, 256

VALIDATORS = 3
"""One would be held back by the rate that a key may ask at: two requests a verdict."""


def main() -> None:
    """Measure without and with a crowd, print."""
    parser = arguments(__doc__, "200 workers, 5 seconds")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    workers, seconds = (200, 5.0) if asked.quick else (asked.workers, asked.seconds)
    figures = {
        "room": measure(workers // 2, workers, seconds, asked.seed),
        "crowd": measure(workers, workers // 2, seconds, asked.seed),
    }
    print(f"{'':8}{'submissions/s':>15}{'verdicts/s':>12}{'a CPU-second':>14}{'waiting':>9}{'longest wait':>14}")
    for name, each in figures.items():
        print(
            f"{name:8}{each['submissions_per_s']:15.1f}{each['verdicts_per_s']:12.1f}"
            f"{each['verdicts_per_cpu_s']:14.1f}{each['waiting_mean']:9.0f}{each['longest_wait_s']:13.1f}s"
        )
    head = {"workers": workers, "seconds": seconds, "seed": asked.seed, "work_s": WORK_S}
    report("crowd", {**head, "load": [round(each, 1) for each in os.getloadavg()], **figures})


def measure(workers: int, at_work: int, seconds: float, seed: int) -> dict[str, float]:
    """Figures of a run in which `at_work` leases may be out at a time."""
    with tempfile.TemporaryDirectory(prefix="shoal-crowd-") as name:
        return asyncio.run(CrowdRun(Path(name), workers, at_work, seed).measure(seconds))


@dataclass
class Caller:
    """One key's signed calls to the application, from an address of its own."""

    app: ASGIApp
    key: Key
    address: str
    run: str

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer."""
        line = RequestLine(method, path, "")
        signed = sign_request(
            self.key,
            line,
            digest(body),
            created=int(time.time()),
            nonce=secrets.token_urlsafe(16),
            sender=SenderState(self.run),
        )
        signed["content-length"] = str(len(body))
        headers = [(name.encode(), value.encode()) for name, value in signed.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "root_path": "",
            "client": (self.address, 1), "server": ("crowd", 80),
        }  # fmt: skip
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        told: list[Message] = []

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # the caller stays
            return asked.pop()

        async def send(message: Message) -> None:
            told.append(message)

        await self.app(scope, receive, send)
        return told[0]["status"], b"".join(message.get("body", b"") for message in told[1:])

    async def ask(self, method: str, path: str, value: Any, kind: Any) -> Any:
        """The JSON answer to a JSON request, which must be a good one."""
        status, body = await self.call(method, path, b"" if value is None else to_json(value))
        assert status < 300, f"{method} {path}: {status} {body[:300]!r}"
        return from_json(body, kind)


class CrowdRun:
    """A run whose roles only send requests: they generate, check and learn nothing."""

    def __init__(self, root: Path, workers: int, at_work: int, seed: int) -> None:
        folder, config = RunFolder(root / "run"), run_file(at_work)
        folder.prepare(config, root)
        self.coordinator: Coordinator = open_run(folder, folder.config())
        self.app = application(self.coordinator)
        self.rng = random.Random(seed)
        self.counts = Counter[str]()
        self.longest_wait_s = 0.0
        self.trainer_key = load_or_make_key(folder.keys / "trainer.key")
        self.trainer = self._caller(self.trainer_key, 0)
        judges = [load_or_make_key(folder.keys / f"validator-{i}.key") for i in range(VALIDATORS)]
        self.validators = [self._caller(key, 1 + number) for number, key in enumerate(judges)]
        keys = [Key(self.rng.randbytes(32)) for _ in range(workers)]
        self.workers = [self._caller(key, number) for number, key in enumerate(keys, 1 + VALIDATORS)]

    def _caller(self, key: Key, number: int) -> Caller:
        return Caller(self.app, key, f"10.0.{number // 250}.{number % 250}", self.coordinator.state.run)

    async def measure(self, seconds: float) -> dict[str, float]:
        """Let all join and warm up for the time that two leases take, then count."""
        for role, caller in [("trainer", self.trainer), *(("validator", each) for each in self.validators)]:
            await caller.ask("POST", "/v1/nodes", t.Join(role, role, 0.0, "x", "float32", "cpu"), t.NodeState)  # type: ignore[arg-type]
        for worker in self.workers:
            join = t.Join("worker", worker.key.public[:8], 0.0, "x", "float32", "cpu")
            await worker.ask("POST", "/v1/nodes", join, t.NodeState)
        jobs = [self._tick(), self._train()]
        jobs += [self._judge(validator) for validator in self.validators]
        jobs += [self._work(worker) for worker in self.workers]
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(2 * WORK_S)
        before, began, cpu, waiting = self.counts.copy(), time.monotonic(), time.process_time(), list[int]()
        self.longest_wait_s = 0.0
        while time.monotonic() < began + seconds:
            await asyncio.sleep(0.1)
            waiting.append(self.counts["asking"])
            for task in tasks:
                if task.done():
                    task.result()
        wall_s, cpu_s, done = time.monotonic() - began, time.process_time() - cpu, self.counts - before
        left = set(tasks)
        while left:  # a cancellation may be lost where a wait ends at the same moment
            for task in left:
                task.cancel()
            left = (await asyncio.wait(left, timeout=0.5))[1]
        return {
            "submissions_per_s": round(done["submission"] / wall_s, 2),
            "verdicts_per_s": round(done["verdict"] / wall_s, 2),
            "verdicts_per_cpu_s": round(done["verdict"] / cpu_s, 2),
            "versions": done["version"],
            "waiting_mean": round(sum(waiting) / len(waiting), 1),
            "longest_wait_s": round(self.longest_wait_s, 2),
        }

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.coordinator.tick()

    async def _work(self, worker: Caller) -> None:
        while True:
            began, answer = time.monotonic(), t.LeaseAnswer(None, 0.0, "")
            self.counts["asking"] += 1
            while answer.lease is None:
                await asyncio.sleep(answer.retry_s)
                answer = await worker.ask("POST", "/v1/leases", t.LeaseRequest(), t.LeaseAnswer)
            self.counts["asking"] -= 1
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)
            await asyncio.sleep(WORK_S * self.rng.uniform(0.5, 1.5))
            lease = answer.lease
            slots = sum(len(block.slots) for block in lease.blocks)
            groups = tuple(self.rng.randbytes(GROUP_SIZE * ROLLOUT_BYTES) for _ in range(slots))
            made = t.Submission(worker.run, lease.id, lease.version, groups, (), t.EngineFacts("x", "float32", "cpu"))
            status, _ = await worker.call("PUT", f"/v1/leases/{lease.id}/submission", to_msgpack(made))
            self.counts["submission" if status == 200 else "superseded"] += 1

    async def _judge(self, validator: Caller) -> None:
        rewards = (0.0, 1.0) * (GROUP_SIZE // 2)
        while True:
            check = (await validator.ask("GET", "/v1/checks", None, t.CheckAnswer)).check
            if check is None:
                continue
            slots = [slot.slot for block in check.lease.blocks for slot in block.slots]
            weight, pay = influence(rewards, 10 * GROUP_SIZE, Grpo()), 10 * GROUP_SIZE
            groups = tuple(
                t.GroupVerdict(
                    slot, must_audit(draw, check.rate, weight, check.mean_influence, pay, check.mean_pay), "accept",
                    rewards=rewards, tokens=10 * GROUP_SIZE,
                )
                for slot, draw in zip(slots, check.draws, strict=True)
            )  # fmt: skip
            verdict = t.Verdict(check.id, groups, dict.fromkeys(check.project_for, (1.0,) * VALUES))
            await validator.ask("PUT", f"/v1/checks/{check.id}/verdict", verdict, t.WriteAck)
            self.counts["verdict"] += 1

    async def _train(self) -> None:
        step = 0
        while True:
            chunk = b"version %d" % step
            name = digest(chunk)
            status, body = await self.trainer.call("PUT", f"/v1/blobs/{name}", chunk)
            assert status == 200, body
            file = t.FileEntry("model.safetensors", len(chunk), name, (name,))
            parents = (step - 1,) if step else ()
            manifest = t.Manifest(
                self.trainer.run, POLICY_STREAM, step, parents, "float32", name, (file,), 1 << 20, 0.0, 0.0
            )
            signed = sign_manifest(manifest, self.trainer_key, now=self.coordinator.clock())
            await self.trainer.ask("POST", "/v1/checkpoints", signed, t.WriteAck)
            self.counts["version"] += 1
            while (await self.trainer.call("GET", f"/v1/batches/{step}"))[0] != 200:
                pass
            step += 1


def run_file(at_work: int) -> RunConfig:
    """A run with room for so many groups: two batches, of blocks of one group."""
    tree = {
        "name": "crowd",
        "steps": 4000,
        "seed": 5,
        "envs": [{"name": "arithmetic"}],
        "sampling": {"max_turn_tokens": 64, "max_tokens": 512},
        "rollouts": {
            "group_size": GROUP_SIZE, "block_rollouts": GROUP_SIZE, "batch_groups": at_work // 2, "max_staleness": 1,
            "lease_s": 60.0,
        },
        "policy": {"tiny": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 64, "max_positions": 64}},
        "verify": {"audit_rate": 0.05},
        "validators": {"count": VALIDATORS},
    }  # fmt: skip
    return from_tree(tree, RunConfig, "crowd")


if __name__ == "__main__":
    main()

"""A whole run in one process without sockets: the real roles over an in-memory network, which lies if a test asks it to.

For story tests. Only the transport is replaced, so a seed gives the same faults again.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import msgspec

from shoal.config import RunConfig
from shoal.config.role_options import NodeOptions
from shoal.engine.dishonest import cheating
from shoal.engine.interface import Engine
from shoal.engine.native import LocalEngine
from shoal.ledger.constants import LAW, Law
from shoal.ledger.log.check import Audit, verify
from shoal.net.client import Client, Timing
from shoal.net.key_files import load_or_make_key
from shoal.protocol.constants import COMPLETIONS
from shoal.roles.coordinator.env_server_client import EnvServerClient
from shoal.roles.coordinator.main import open_run
from shoal.roles.coordinator.routes import application
from shoal.roles.env_server.server import Stage
from shoal.roles.node.lifecycle import Node
from shoal.roles.trainer import Trainer
from shoal.roles.validator import Validator
from shoal.roles.worker.worker import Worker
from shoal.run_folder import RunFolder, write_atomically
from shoal.typed_toml import from_tree
from shoal.weights.manifest import weights_root
from tests.net.faults import FaultyTransport

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import one_file

URL = "http://coordinator"

TINY = {
    "name": "town",
    "steps": 3,
    "seed": 5,
    "envs": [{"name": "arithmetic"}],
    "sampling": {"max_turn_tokens": 6, "max_tokens": 64},
    "rollouts": {"group_size": 8, "block_rollouts": 16, "batch_groups": 3, "max_staleness": 0, "lease_s": 5.0},
    "policy": {"tiny": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_width": 64, "max_positions": 64}},
    "train": {"lr": 1e-3},
    "verify": {"quarantine_s": 0.5},
}
"""A run of three small synchronous steps."""


def tiny_run(**changes: object) -> RunConfig:
    """The tiny run with some sections or keys replaced, such as `rollouts={...}`."""
    tree = dict(TINY)
    for name, value in changes.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and name in tree else value  # type: ignore[dict-item]
    return from_tree(tree, RunConfig, "test")


def stranger(role: Worker | Validator, **limits: int) -> Worker | Validator:
    """A node as a person starts it, not the launcher."""
    role.node.options = msgspec.structs.replace(role.node.options, run_dir="", **limits)
    return role


def weights_of_one_file(config: RunConfig, out: Path) -> str:
    """The weights root of the same run in one file, without a network. Paths in the config are relative to the parent."""
    return one_file.train(config, out, out.parent)


class RunTestbed:
    """A run's folder with its coordinator, and the roles that a test starts."""

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        fault_rate: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        law: Law = LAW,
        *,
        for_others: bool = False,
    ) -> None:
        self.folder = RunFolder(root)
        self.folder.prepare(config, root, for_others=for_others)
        self.config = self.folder.config()
        self.clock = clock
        self.coordinator = open_run(self.folder, self.config, clock, law)
        self.stage: Stage | None = None
        if any(env.kind == COMPLETIONS for env in self.config.envs):
            self.stage = Stage(self.folder, self.config, clock=clock)
            write_atomically(self.folder.stage_address, json.dumps({"url": "http://stage"}).encode())
            self.coordinator.stage = EnvServerClient(
                self.folder.stage_address, self.coordinator.key, self.folder.run_id(), self.to_stage
            )
        self.app = application(self.coordinator)
        self.fault_rate, self.rng = fault_rate, random.Random(seed)

    def client(self, key_file: Path) -> Client:
        """A client with its own key over this testbed's network."""
        transport: httpx.AsyncBaseTransport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        if self.fault_rate:
            rng = random.Random(self.rng.random())
            transport = FaultyTransport(transport, rng, asyncio.sleep, rate=self.fault_rate, delay_s=0.01)
        key, rng = load_or_make_key(key_file), random.Random(1)
        return Client(URL, key, transport=transport, timing=Timing(self.clock, _hurry, rng=rng))

    def to_stage(self, url: str) -> Client:
        """The coordinator's client of the stage."""
        assert self.stage is not None
        transport = httpx.ASGITransport(self.stage.application(), raise_app_exceptions=False)
        return Client(
            url, self.coordinator.key, run=self.folder.run_id(), transport=transport, timing=Timing(self.clock, _hurry)
        )

    def worker(self, name: str, cheat: str = "", own_files: bool = True) -> Worker:
        """A worker, honest or not, which has the host's files or is a stranger."""
        home = self.folder.nodes / name
        client = self.client(home / "node.key")
        key = load_or_make_key(home / "node.key").public

        def make_engine(dtype: str, **named: str) -> Engine:
            engine = LocalEngine(threads=1, dtype=dtype, **named)
            return cheating(cheat, engine) if cheat else engine

        return Worker(Node(client, key, self.options(home, own_files), make_engine, self.clock))

    def options(self, home: Path, own_files: bool = True) -> NodeOptions:
        """Of a node that is the host's own or a stranger's."""
        return NodeOptions(url=URL, home=str(home), name=home.name, run_dir=str(self.folder.root) if own_files else "")

    def validator(self) -> Validator:
        """The host's own validator."""
        path, home = self.folder.keys / "validator-0.key", self.folder.nodes / "validator-0"
        key = load_or_make_key(path).public
        return Validator(Node(self.client(path), key, self.options(home), partial(LocalEngine, 1), self.clock))

    def trainer(self) -> Trainer:
        """The trainer."""
        path = self.folder.keys / "trainer.key"
        return Trainer(self.folder, self.config, self.client(path), load_or_make_key(path), self.clock)

    async def live(self, *roles: Worker | Validator | Trainer, limit_s: float = 120.0) -> None:
        """Let roles work until the run has ended and they have left."""
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            clock = group.create_task(self._tick())
            async with asyncio.TaskGroup() as people:
                for role in roles:
                    people.create_task(role.run())
            clock.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            await self.coordinator.tick()

    def weights(self) -> str:
        """Weights root of the final checkpoint."""
        return weights_root(self.folder.checkpoints / "final")

    def audit(self) -> Audit:
        """Replay and check the log."""
        return verify(self.coordinator.log_writer.store.read())


async def _hurry(seconds: float) -> None:
    """Sleep for almost no time, so that tests do not wait for retries."""
    await asyncio.sleep(min(seconds, 0.01))
